"""Communication between ranks. No other floor makes process groups or calls collectives."""

from foldray.comm.communicator import Communicator, Count, Pending, Traffic
from foldray.comm.exchange import exchange, gather_rows, gather_sequence, scatter_rows, scatter_sequence
from foldray.comm.groups import TRAFFIC, Groups, host_group
from foldray.comm.probe import UnsupportedBackend, probe

__all__ = [
    "TRAFFIC",
    "Communicator",
    "Count",
    "Groups",
    "Pending",
    "Traffic",
    "UnsupportedBackend",
    "exchange",
    "gather_rows",
    "gather_sequence",
    "host_group",
    "probe",
    "scatter_rows",
    "scatter_sequence",
]
