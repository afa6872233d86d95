"""The nodes that take sessions: who they say they are, whether they shall take more, when they were heard of."""

from __future__ import annotations

from polar.contract.rollout import NodeSpec
from polar.store import events
from polar.store.codec import dumps, loads
from polar.store.connection import Connection

FIRST_SECONDS = 30.0
"""How long after it registered a node counts as healthy before its first heartbeat."""


def put(db: Connection, spec: NodeSpec, now: float) -> bool:
    """A node has registered; whether it is another process than the one that had this id before."""
    until = now + FIRST_SECONDS
    row = db.execute("SELECT spec, gone FROM nodes WHERE node_id = ?", (spec.node_id,)).fetchone()
    if row is None:
        db.execute(
            "INSERT INTO nodes (node_id, spec, draining, gone, heard_at, healthy_until) VALUES (?, ?, 0, 0, ?, ?)",
            (spec.node_id, dumps(spec), now, until),
        )
        events.add(db, "node", now, spec.node_id, "up")
        return False
    another = loads(row[0], NodeSpec).instance != spec.instance
    db.execute(
        "UPDATE nodes SET spec = ?, draining = CASE WHEN ? = 1 THEN 0 ELSE draining END, gone = 0, heard_at = ?, "
        "healthy_until = ? WHERE node_id = ?",
        (dumps(spec), int(another), now, until, spec.node_id),
    )
    if another or row[1]:
        events.add(db, "node", now, spec.node_id, "up")
    return another


def heard(db: Connection, node_id: str, now: float, healthy_until: float) -> bool:
    """A node's sign of life; whether it shall take no more."""
    row = db.execute("SELECT draining, gone FROM nodes WHERE node_id = ?", (node_id,)).fetchone()
    if row is None:
        return False
    db.execute(
        "UPDATE nodes SET heard_at = ?, healthy_until = ?, gone = 0 WHERE node_id = ?", (now, healthy_until, node_id)
    )
    if row[1]:
        events.add(db, "node", now, node_id, "up")
    return bool(row[0])


def is_draining(db: Connection, node_id: str) -> bool:
    row = db.execute("SELECT draining FROM nodes WHERE node_id = ?", (node_id,)).fetchone()
    return row is not None and bool(row[0])


def drain(db: Connection, node_id: str, now: float) -> None:
    """From here on the node takes no more."""
    changed = db.execute("UPDATE nodes SET draining = 1 WHERE node_id = ? AND draining = 0", (node_id,)).rowcount
    if changed:
        events.add(db, "node", now, node_id, "draining")


def mark_gone(db: Connection, now: float) -> None:
    """Nodes that were not heard of within their time are gone, until they are heard of again."""
    late = "SELECT node_id FROM nodes WHERE gone = 0 AND healthy_until < ?"
    for (node_id,) in db.execute(late, (now,)).fetchall():
        db.execute("UPDATE nodes SET gone = 1 WHERE node_id = ?", (node_id,))
        events.add(db, "node", now, node_id, "gone")


def forget(db: Connection, before: float) -> None:
    """Drop nodes that are gone, hold nothing, and were last heard of before ``before``."""
    db.execute(
        "DELETE FROM nodes WHERE gone = 1 AND heard_at < ? AND NOT EXISTS "
        "(SELECT 1 FROM leases l WHERE l.node_id = nodes.node_id AND l.lapses IS NOT NULL)",
        (before,),
    )
