"""What belongs together: projections that engines run as one, and the scales of keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from halfbyte.audit.inspection import Anomaly, WeightKind, WeightRow


def fused_anomalies(rows: Iterable[WeightRow], fused_groups: Mapping[str, str]) -> list[Anomaly]:
    """Fused partners with different numbers. fused_groups: weight -> the key that its partners share."""
    groups: dict[str, list[WeightRow]] = {}
    for row in rows:
        if key := fused_groups.get(row.name):
            groups.setdefault(key, []).append(row)
    found = []
    for key, members in groups.items():
        if len({_numbers(row.kind) for row in members}) > 1:
            parts = ", ".join(
                f"{row.name.rpartition('.')[2]} {' '.join(_numbers(row.kind))}" for row in members
            )
            found.append(Anomaly(key, f"engines run these as one, yet they differ: {parts}"))
    return found


def kv_findings(names: Iterable[str], scheme: str | None) -> tuple[list[Anomaly], list[str]]:
    """Anomalies and notes about stored KV cache scales, given their names and what config.json says in words."""
    names = list(names)
    holders: dict[str, set[str]] = {}
    for name in names:
        holder, _, leaf = name.rpartition(".")
        holders.setdefault(holder.removesuffix(".k_proj").removesuffix(".v_proj"), set()).add(leaf)
    anomalies = [
        Anomaly(holder, f"has {', '.join(sorted(leaves))} without its partner")
        for holder, leaves in holders.items()
        if ("k_scale" in leaves) != ("v_scale" in leaves) and "kv_scale" not in leaves
    ]
    if scheme and "static" in scheme and not names:
        anomalies.append(Anomaly("config.json", f"KV cache {scheme}, yet no k_scale or v_scale is stored"))
    notes = []
    if names and scheme is None:
        notes.append(f"{len(names)} KV cache scales are stored, yet config.json has no KV scheme")
    return anomalies, notes


def _numbers(kind: WeightKind) -> tuple[str, str, str]:
    return kind.scheme, kind.element, kind.group
