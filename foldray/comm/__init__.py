"""The only floor that makes process groups and talks."""

from foldray.comm.communicator import Communicator, Count, Pending, Traffic
from foldray.comm.exchange import exchange, gather_rows, gather_sequence, scatter_rows, scatter_sequence
from foldray.comm.groups import TRAFFIC, Groups, host_group

__all__ = [
    "TRAFFIC",
    "Communicator",
    "Count",
    "Groups",
    "Pending",
    "Traffic",
    "exchange",
    "gather_rows",
    "gather_sequence",
    "host_group",
    "scatter_rows",
    "scatter_sequence",
]
