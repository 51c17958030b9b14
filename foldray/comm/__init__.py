"""Communication between ranks. No other package in foldray/ makes process groups or calls collectives."""

from foldray.comm.activity import Activity
from foldray.comm.communicator import Communicator, Count, Pending, Traffic, used_here
from foldray.comm.dispatch_queue import DispatchQueue
from foldray.comm.exchange import (
    gather_rows,
    gather_sequence,
    mirrored,
    mirrored_together,
    scatter_rows,
    scatter_sequence,
    sum_over_members,
)
from foldray.comm.groups import APART, TRAFFIC, Groups, host_group
from foldray.comm.probe import UnsupportedBackend, probe
