"""The structs and numbers that Python shares with runtime.h, field by field."""

import ctypes

KINDS = ("load", "store", "atomic")
SPACES = ("array", "shared", "module", "other")
ORDERS = {"forward": 0, "reverse": 1, "shuffle": 2}
RUN, TRACE, RACES = range(3)
(
    OK,
    OUT_OF_BOUNDS,
    MISALIGNED,
    DEADLOCK,
    MIXED,
    NOT_IN_MASK,
    ASSERTION,
    TRAP,
    DIVISION,
    SEGMENTATION,
    INTERRUPTED,
    MISUSE,
) = range(12)


class U3(ctypes.Structure):
    _fields_ = [(c, ctypes.c_uint32) for c in "xyz"]

    def tuple(self) -> tuple[int, int, int]:
        return self.x, self.y, self.z


class Range(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


class Failure(ctypes.Structure):
    _fields_ = [
        ("fault", ctypes.c_int32),
        ("line", ctypes.c_int32),
        ("other_line", ctypes.c_int32),
        ("pc", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("size", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("range", ctypes.c_int32),
        ("block", U3),
        ("thread", U3),
        ("waiting", ctypes.c_uint32),
        ("live", ctypes.c_uint32),
        ("text", ctypes.c_char * 512),
    ]


class Access(ctypes.Structure):
    _fields_ = [
        ("pc", ctypes.c_uint64),
        ("kind", ctypes.c_uint32),
        ("space", ctypes.c_uint32),
        ("range", ctypes.c_int32),
        ("size", ctypes.c_uint32),
        *((n, ctypes.c_uint64) for n in ("requests", "lanes", "bytes", "sectors", "passes", "least_passes")),
    ]


class Race(ctypes.Structure):
    _fields_ = [
        ("pc", ctypes.c_uint64),
        ("other_pc", ctypes.c_uint64),
        ("kind", ctypes.c_uint32),
        ("other_kind", ctypes.c_uint32),
        ("space", ctypes.c_uint32),
        ("range", ctypes.c_int32),
        ("address", ctypes.c_uint64),
        ("block", U3),
        ("other_block", U3),
        ("thread", ctypes.c_uint32),
        ("other_thread", ctypes.c_uint32),
        ("count", ctypes.c_uint64),
    ]


class Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("anchor", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("ranges", ctypes.POINTER(Range)),
        ("range_count", ctypes.c_uint32),
        ("strict", ctypes.c_uint32),
        ("grid", U3),
        ("block", U3),
        ("shared_bytes", ctypes.c_uint64),
        ("workers", ctypes.c_uint32),
        ("mode", ctypes.c_uint32),
        ("order", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("blocks", ctypes.c_uint64),
        ("idle", ctypes.c_uint64),
        ("failure", Failure),
        ("accesses", ctypes.POINTER(Access)),
        ("access_count", ctypes.c_uint64),
        ("races", ctypes.POINTER(Race)),
        ("race_count", ctypes.c_uint64),
        ("printed", ctypes.c_void_p),
        ("printed_bytes", ctypes.c_uint64),
    ]
