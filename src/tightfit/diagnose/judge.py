"""Evidence in, diagnosis out: the first cause, and not what followed from it.

When one rank falls, the others fall after it, and say so at greater length. What a symptom's entry calls a *fault*
counts before how processes *ended*, and that before the *echoes* of ranks that lost a neighbour; among equals the first
counts, by the clock where the logs have one. A fault after which the training went on was none.
"""

from __future__ import annotations

from dataclasses import replace

from tightfit.diagnose.cases import cases_of
from tightfit.diagnose.catalogue import catalogue
from tightfit.diagnose.evidence import Evidence, LogSource, RankExit
from tightfit.diagnose.exits import exit_cases
from tightfit.diagnose.hints import merged
from tightfit.diagnose.ordering import KERNEL, Case, in_order
from tightfit.diagnose.scan import scan
from tightfit.diagnose.verdict import Diagnosis, Verdict
from tightfit.diagnose.wording import verdict_of
from tightfit.job.known import KnownConfig

__all__ = ["Evidence", "KnownConfig", "LogSource", "RankExit", "judge", "known_symptom"]

MOST_BESIDE = 5


def known_symptom(name: str, config: KnownConfig) -> Verdict:
    """What the catalogue says of a symptom that is known without a log."""
    return verdict_of(Case(symptom=catalogue().by_id[name], source=None, order=0), (), config)


def judge(evidence: Evidence) -> Diagnosis:
    """What went wrong first; a diagnosis without a verdict: nothing did."""
    entries = catalogue()
    kernel = (LogSource(name=KERNEL, text="\n".join(evidence.kernel)),) if evidence.kernel else ()
    logs = (*evidence.logs, *kernel)
    scans = [scan(source, index, entries) for index, source in enumerate(logs)]
    config = merged(evidence.config, [each.hints.config for each in scans])
    if evidence.vocabulary is not None:
        config = replace(config, vocabulary=evidence.vocabulary)
    cases = [
        case
        for source, each in zip(logs, scans, strict=True)
        for case in cases_of(each, config, entries, is_kernels=source in kernel)
    ]
    cases += exit_cases(evidence.exits, scans, [source.rank for source in logs], config, entries)
    ended_well = bool(evidence.exits) and all(gone.code == 0 for gone in evidence.exits)
    ordered = in_order(cases, evidence.exits, ended_well=ended_well)
    verdict = verdict_of(ordered.first, logs, config) if ordered.first else None
    return Diagnosis(
        verdict=verdict, also=tuple(verdict_of(case, logs, config) for case in ordered.beside[:MOST_BESIDE])
    )
