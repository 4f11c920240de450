"""What takes memory, as people read it: `master_weights` of a phase is master weights."""

from __future__ import annotations

from tightfit.messages import Message, Said, texts_of


def name_component(component: str) -> Said:
    return Message(f"part.{component}") if component in texts_of("part") else component.replace("_", " ")
