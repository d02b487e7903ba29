"""The test kit: a simulated disk, fault plans, crash images and the oracle of durability.

Ships with the package, so that another user of its seams can test against them. Nothing in the
engine imports it.
"""

from tablespace.testing.bad_sectors import BadSectors
from tablespace.testing.crash import Hunt, HuntReport
from tablespace.testing.directory import SimulatedDirectory
from tablespace.testing.disk import Disk, Event
from tablespace.testing.faults import Fault, FaultPlan, lying_disk
from tablespace.testing.images import Choice, DiskState, choices
from tablespace.testing.model import Breach, Recorder
from tablespace.testing.simulated import SimulatedDevice, SimulatedQueue
from tablespace.testing.workload import Workload

__all__ = [
    "BadSectors",
    "Breach",
    "Choice",
    "Disk",
    "DiskState",
    "Event",
    "Fault",
    "FaultPlan",
    "Hunt",
    "HuntReport",
    "Recorder",
    "SimulatedDevice",
    "SimulatedDirectory",
    "SimulatedQueue",
    "Workload",
    "choices",
    "lying_disk",
]
