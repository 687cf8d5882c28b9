"""Graphs as JSON, in and out; every key is described in `docs/graph_format.md`."""

from __future__ import annotations

import json
import os
from typing import Any, Final

from ..base.errors import GraphError
from ..base.fields import Fields, is_text, load, show
from .records import Device, Op, Records, Storage, Workspace

FORMAT: Final = "sn_memory.graph.v1"
_BY_DTYPE: Final = "flops_per_s_by_dtype"


def _read_storage(data: object, where: str) -> Storage:
    row = Fields(data, where, GraphError)
    storage = Storage(
        row.text("name"),
        row.integer("bytes"),
        row.text("role", "activation"),
        row.flag("keep"),
        row.flag("held"),
    )
    row.done()
    return storage


def _read_workspace(data: object, where: str) -> Workspace:
    row = Fields(data, where, GraphError)
    way = Workspace(row.integer("bytes"), row.number("seconds", None), row.text("name", ""))
    row.done()
    return way


def _read_op(data: object, where: str) -> Op:
    row = Fields(data, where, GraphError)
    op = Op(
        name=row.text("name"),
        inputs=row.names("inputs"),
        outputs=row.names("outputs"),
        writes=row.names("writes"),
        releases=row.names("releases"),
        kind=row.text("kind", ""),
        phase=row.text("phase", "forward"),
        seconds=row.number("seconds", None),
        flops=row.number("flops", 0.0),
        traffic_bytes=row.integer("traffic_bytes", None),
        random=row.flag("random"),
        replayable=row.flag("replayable"),
        effect=row.flag("effect"),
        collective=row.flag("collective"),
        fixed=row.flag("fixed"),
        once=row.flag("once"),
        workspaces=tuple(
            _read_workspace(way, f"{where}.workspaces[{index}]")
            for index, way in enumerate(row.items("workspaces", ()))
        ),
        dtype=row.text("dtype", ""),
    )
    row.done()
    return op


def _read_device(row: Fields | None) -> Device:
    if row is None:
        return Device()
    device = Device(
        name=row.text("name", ""),
        flops_per_s=row.number("flops_per_s", None),
        bytes_per_s=row.number("bytes_per_s", None),
        to_host_bytes_per_s=row.number("to_host_bytes_per_s", None),
        to_device_bytes_per_s=row.number("to_device_bytes_per_s", None),
        transfer_latency_s=row.number("transfer_latency_s", 0.0),
        pinned_bytes=row.integer("pinned_bytes", None),
        launch_s=row.number("launch_s", 0.0),
        flops_per_s_by_dtype=_read_speeds(row),
    )
    row.done()
    return device


def _read_speeds(device: Fields) -> tuple[tuple[str, float], ...]:
    speeds = Fields(device.mapping(_BY_DTYPE), f"{device.path}.{_BY_DTYPE}", GraphError)
    found = tuple((dtype, speeds.number(dtype)) for dtype in speeds.keys)
    speeds.done()
    return found


def read(source: str | os.PathLike[str]) -> Records:
    """Read records from a path or from JSON text; raises GraphError naming the line or key."""
    row = Fields(load(source, GraphError, "graph"), "graph", GraphError)
    if (version := row.text("format")) != FORMAT:
        raise row.fail("format", version, f'"{FORMAT}"')
    aliases = row.mapping("aliases")
    for alias, target in aliases.items():
        if not is_text(target):
            raise GraphError(
                f"aliases.{alias}: got {show(target)}, expected the name of a storage."
            )
    graph = Records(
        tuple(
            _read_storage(item, f"storages[{at}]") for at, item in enumerate(row.items("storages"))
        ),
        tuple(_read_op(item, f"ops[{at}]") for at, item in enumerate(row.items("ops"))),
        name=row.text("name", ""),
        device=_read_device(row.child("device")),
        allocator=row.text("allocator", "none"),
        aliases=aliases,
        unplanned_peak_bytes=row.integer("unplanned_peak_bytes", None),
    )
    row.done()
    return graph


def _record(value: Storage | Op | Device | Workspace) -> dict[str, Any]:
    """Return a record as a JSON object without the fields that have their default."""
    result: dict[str, Any] = {}
    for key, spec in type(value).__dataclass_fields__.items():
        item = getattr(value, key)
        if item == spec.default and key not in ("name", "bytes"):
            continue
        if key == _BY_DTYPE:
            item = dict(item)
        elif isinstance(item, tuple):
            item = [_record(part) if isinstance(part, Workspace) else part for part in item]
        result[key] = item
    return result


def text_of(graph: Records) -> str:
    """Return the graph as JSON text, one record a line, so that it can be compared by line."""
    lines = ["{", f'"format": {json.dumps(FORMAT)},', f'"name": {json.dumps(graph.name)},']
    lines.append(f'"allocator": {json.dumps(graph.allocator)},')
    lines.append(f'"device": {json.dumps(_record(graph.device))},')
    lines.append(f'"aliases": {json.dumps(dict(graph.aliases))},')
    if graph.unplanned_peak_bytes is not None:
        lines.append(f'"unplanned_peak_bytes": {graph.unplanned_peak_bytes},')
    for key, items, end in (("storages", graph.storages, ","), ("ops", graph.ops, "")):
        body = ",\n".join(json.dumps(_record(item)) for item in items)
        lines.append(f'"{key}": [\n{body}\n]{end}' if body else f'"{key}": []{end}')
    return "\n".join([*lines, "}"]) + "\n"
