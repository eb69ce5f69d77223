"""The connections of the tenants' port: what they are at, and who had to make room for whom."""

from gateway.connection_table import ConnectionTable, Standing
from gateway.telemetry.metrics.family import Family, Kind
from gateway.telemetry.metrics.registry import Registry


def show_connections(registry: Registry, table: ConnectionTable) -> None:
    states = [(standing, (standing.name.lower(),)) for standing in Standing]
    is_open = Family("sluice.connections", Kind.GAUGE, "", "Open connections, by what they are at.", ("state",))
    registry.read(is_open, lambda: [(labels, table.num(standing)) for standing, labels in states])
    closed = Family(
        "sluice.connections.closed", Kind.COUNTER, "", "Closed to make room, by what they were at.", ("state",)
    )
    registry.read(closed, lambda: [(labels, table.num_given_up[standing]) for standing, labels in states])
    registry.total("sluice.connections.refused", "Turned away: nobody could make room.", lambda: table.num_refused)
