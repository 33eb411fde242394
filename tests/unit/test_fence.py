"""NVMe reservations as the kernel is asked for them, against a double of a namespace that keeps the rules of NVMe."""

from __future__ import annotations

import errno
import fcntl
import struct

import pytest

from kvfs.errors import DeviceError
from kvfs.pool import fence
from kvfs.pool.fence import Step, give_back, kernel_reservation, reserve


class Namespace:
    """A double: what the kernel's NVMe driver and a namespace make of the ioctls. A descriptor's number is the host."""

    def __init__(self, conflict: int) -> None:
        self.conflict = conflict
        self.keys: dict[int, int] = {}
        self.holder: int | None = None

    def ioctl(self, host: int, request: int, data: bytearray, mutate: bool) -> int:
        assert mutate and len(data) == request >> 16 & 0x3FFF and chr(request >> 8 & 0xFF) == "p"
        number, first = request & 0xFF, struct.unpack_from("<Q", data)[0]
        if number == 200:
            new, flags = struct.unpack_from("<QI", data, 8)
            if host in self.keys and (not first or (self.keys[host] != first and not flags & 1)):
                return 0 if self.keys[host] == new else self.conflict
            self.keys[host] = new
            return 0
        if number == 203:
            key, kind = struct.unpack_from("<QI", data, 8)
            if self.keys.get(host) != key or first not in self.keys.values():
                return self.conflict
            for gone in [other for other, other_key in self.keys.items() if other_key == first and other != host]:
                del self.keys[gone]
                self.holder = host if self.holder == gone else self.holder
        elif self.keys.get(host) != first:
            return self.conflict
        elif number == 201:
            kind = struct.unpack_from("<I", data, 8)[0]
            if self.holder not in (None, host):
                return self.conflict
            self.holder = host
        elif number == 202:
            kind = struct.unpack_from("<I", data, 8)[0]
            self.holder = None if self.holder == host else self.holder
        else:
            kind, self.holder = 3, None
            self.keys.clear()
        assert kind == 3
        return 0

    def of(self, host: int) -> fence.Reservation:
        return lambda step, key, other=0: kernel_reservation(host, "/dev/nvme0n1", step, key, other)


@pytest.fixture(params=[0x18, 0x4083])
def namespace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    made = Namespace(request.param)
    monkeypatch.setattr(fcntl, "ioctl", made.ioctl)
    return made


def test_it_is_held_until_it_is_given_back(namespace: Namespace) -> None:
    reserve(namespace.of(1), 11, 0)
    assert namespace.keys == {1: 11} and namespace.holder == 1
    give_back(namespace.of(1), 11)
    assert namespace.keys == {} and namespace.holder is None


def test_what_a_killed_daemon_of_this_host_left_is_taken_on(namespace: Namespace) -> None:
    reserve(namespace.of(1), 11, 0)
    reserve(namespace.of(1), 12, 11)
    assert namespace.keys == {1: 12} and namespace.holder == 1


def test_what_this_host_left_under_a_key_that_no_beat_has_is_taken_on(namespace: Namespace) -> None:
    """Killed between the reservation and the first beat."""
    reserve(namespace.of(1), 11, 0)
    reserve(namespace.of(1), 12, 0)
    assert namespace.keys == {1: 12} and namespace.holder == 1
    give_back(namespace.of(1), 12)
    assert namespace.keys == {} and namespace.holder is None


def test_another_host_is_preempted_and_has_nothing_to_give_back(namespace: Namespace) -> None:
    reserve(namespace.of(1), 11, 0)
    reserve(namespace.of(2), 22, 11)
    assert namespace.keys == {2: 22} and namespace.holder == 2
    give_back(namespace.of(1), 11)
    assert namespace.keys == {2: 22} and namespace.holder == 2


def test_a_reservation_of_somebody_unknown_is_an_error_that_names_the_device(namespace: Namespace) -> None:
    reserve(namespace.of(1), 11, 0)
    with pytest.raises(DeviceError, match="/dev/nvme0n1: reservation: ACQUIRE: status") as caught:
        reserve(namespace.of(2), 22, 0)
    assert caught.value.errno == errno.EBADE and namespace.holder == 1


@pytest.mark.parametrize("answer", [errno.EOPNOTSUPP, errno.ENOTTY, errno.EPERM, -1, -0x4001])
def test_a_device_without_them_says_so(monkeypatch: pytest.MonkeyPatch, answer: int) -> None:
    def ioctl(*_: object) -> int:
        if answer > 0:
            raise OSError(answer, "no")
        return -answer

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    with pytest.raises(DeviceError) as caught:
        kernel_reservation(1, "/dev/nvme0n1", Step.REGISTER, 11, 0)
    assert caught.value.errno == errno.EOPNOTSUPP
