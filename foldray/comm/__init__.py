"""The only floor that makes process groups and talks."""

from foldray.comm.exchange import exchange
from foldray.comm.groups import Communicator, Groups, host_group

__all__ = ["Communicator", "Groups", "exchange", "host_group"]
