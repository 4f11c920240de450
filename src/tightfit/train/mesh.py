"""The ranks as a grid, where they play different parts.

From the outside in: the stages of a pipeline, groups with a copy of the weights each, ranks that share a copy, ranks
that share each layer. Neighbours talk most: those that share layers in every layer, stages once in a micro batch.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tightfit.train.place import Place
from tightfit.types import Levers

STAGES, COPIES, SHARDS, TENSOR = "stages", "copies", "shards", "tensor"
EXPERTS, OWNERS = "experts", "owners"
"""Of ranks that share a copy: neighbours that have other experts each, and those that own the same ones."""
ALL = "shards and tensor"
"""Ranks that together have all of a copy, where some of them share layers."""


def make_mesh(levers: Levers, place: Place) -> DeviceMesh:
    """With the dimensions that have more than one rank, and with SHARDS."""
    shards, stages, tensor = levers.shards(place.world), levers.pipeline_parallel, levers.tensor_parallel
    sizes = {STAGES: stages, COPIES: place.world // (stages * shards * tensor), SHARDS: shards, TENSOR: tensor}
    kept = {name: size for name, size in sizes.items() if size > 1 or name == SHARDS}
    return init_device_mesh(place.device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def make_expert_mesh(levers: Levers, place: Place) -> DeviceMesh:
    """The ranks as experts see them."""
    experts, shards, stages = levers.expert_parallel, levers.shards(place.world), levers.pipeline_parallel
    sizes = stages, place.world // (stages * shards), shards // experts, experts
    return init_device_mesh(place.device.type, sizes, mesh_dim_names=(STAGES, COPIES, OWNERS, EXPERTS))


def make_mesh_of_all(levers: Levers, place: Place) -> DeviceMesh:
    """The same ranks for what is not cut within layers: all of a copy share it."""
    whole, stages = levers.shards(place.world) * levers.tensor_parallel, levers.pipeline_parallel
    sizes = {STAGES: stages, COPIES: place.world // (stages * whole), ALL: whole}
    kept = {name: size for name, size in sizes.items() if size > 1 or name == ALL}
    return init_device_mesh(place.device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def share_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Of the ranks with the same layers: those that share a copy of them, and the groups with a copy each."""
    names = mesh.mesh_dim_names or ()
    kept = tuple(name for name in names if name in (COPIES, SHARDS, ALL))
    return mesh if kept == names else mesh[kept]
