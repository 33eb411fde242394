"""The process of a daemon: started in the foreground, or as a fork that the command line waits for."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
from typing import NoReturn

import trio

from kvfs import signals
from kvfs.cgroup import no_thread
from kvfs.daemon.daemon import serve
from kvfs.daemon.first import leave_first
from kvfs.daemon.holding import hold
from kvfs.daemon.host import raise_fuse_pages, raise_limits
from kvfs.daemon.options import MountOptions, check_hold, check_idmap, check_request_timeout, fit_memory
from kvfs.daemon.reporter import LOG_NAME, Reporter, log_to_file, log_to_stderr
from kvfs.errors import DeadlineError, KvfsError, MissingFeatureError, PoolError, UsageError, first_error, printable
from kvfs.frontend import mount as mounting
from kvfs.pool.directory import check_owner

# One logger name for the whole room: it is in every line of the log.
log = logging.getLogger(__package__)


def start(options: MountOptions) -> int:
    """Mount the pool, export it, or both. In the background: return the daemon's pid once the mount answers and every
    socket listens. In the foreground: return when it has ended.

    Raises KvfsError with the reason; the mount point and the pool are then as they were.
    """
    assert options.mountpoint is not None or options.exports
    check_request_timeout(options)
    check_hold(options)
    check_idmap(options)
    options = fit_memory(options)
    if options.foreground:
        leave_first()
        log_to_stderr(logging.INFO, options.log_format)
        if _run(options, Reporter(None)) == signals.INTERRUPT:
            raise KeyboardInterrupt  # told as by each other command
        return os.getpid()
    return _start_in_background(options)


def _start_in_background(options: MountOptions) -> int:
    # The child is a fork rather than a new interpreter: it sees the same files and needs no second start. Nothing here
    # has threads yet.
    reading, writing = os.pipe2(os.O_CLOEXEC)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _child(options, Reporter(writing, options.log_format))
    os.close(writing)
    try:
        return _relay(pid, reading, options)
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGTERM)
        raise
    finally:
        os.close(reading)


def _relay(pid: int, reading: int, options: MountOptions) -> int:
    """Pass on the starting daemon's messages, until it is ready or has failed."""
    poller = select.poll()
    poller.register(reading, select.POLLIN)
    pending = b""
    while True:
        if not poller.poll(options.start_timeout_s * 1000):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise DeadlineError(
                f"{options.pool}: the daemon said nothing for {options.start_timeout_s:g} s while starting; stopped"
            )
        data = os.read(reading, 65536)
        pending += data
        *lines, pending = pending.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "ready" in message:
                return pid
            if "error" in message:
                os.waitpid(pid, 0)
                failure = (UsageError if message.get("usage") else KvfsError)(message["error"])
                failure.errno = message["errno"]
                raise failure
            print(printable(f"kvfs: {message.get('info')}"), file=sys.stderr, flush=True)
        if not data:
            _, status = os.waitpid(pid, 0)
            code = os.waitstatus_to_exitcode(status)
            reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            raise KvfsError(
                f"{options.pool}: the daemon ended while starting ({reason}); see {options.pool / LOG_NAME}"
            )


def _child(options: MountOptions, reporter: Reporter) -> NoReturn:
    """The daemon's life after the fork; never returns into the command line."""
    status = 1
    try:
        signals.reset()
        os.setsid()
        os.chdir("/")
        devnull = os.open(os.devnull, os.O_RDWR)
        os.dup2(devnull, 0)
        os.dup2(devnull, 1)
        log_to_stderr(logging.WARNING)
        _run(options, reporter)
        status = 0
    except KvfsError as error:
        if reporter.done:
            log.error("%s", error)
        reporter.error(error)
    except OSError as error:
        _log_failure(options, reporter)
        reporter.error(KvfsError(f"{error.filename or options.pool}: {error.strerror or error}"))
    except BaseException as error:
        _log_failure(options, reporter)
        reporter.error(KvfsError(f"{options.pool}: internal error: {type(error).__name__}: {error}"))
    finally:
        logging.shutdown()
        os._exit(status)


def _log_failure(options: MountOptions, reporter: Reporter) -> None:
    """The traceback goes into the log; the waiting command line gets one line."""
    pool = options.pool
    if not reporter.done and os.environ.get("KVFS_DEBUG") != "1":
        if not (pool / "pool.toml").exists():
            return
        try:
            check_owner(pool)
            log_to_file(pool / LOG_NAME, options.log_format)
        except PoolError as error:
            log.error("%s", error)
    log.exception("the daemon failed")


def _run(options: MountOptions, reporter: Reporter) -> int | None:
    """Serve until the end; returns the signal that asked for it, if one did."""
    try:
        return _prepare_and_serve(options, reporter)
    except BaseExceptionGroup as group:
        failure = first_error(group)
    except RuntimeError as error:
        failure = error
    if text := no_thread(failure):
        raise MissingFeatureError(f"{options.pool}: {text}") from failure
    raise failure from None


def _prepare_and_serve(options: MountOptions, reporter: Reporter) -> int | None:
    mountpoint = None
    mounting.refuse_inside(options.pool, "a pool")
    holding = hold(options)
    try:
        if holding is not None and holding.taken:
            mountpoint = holding.mountpoint
        elif options.mountpoint is not None:
            mountpoint = mounting.check_mountpoint(
                options.mountpoint, options.pool, nonempty=mounting.NONEMPTY in options.options
            )
            mounting.check_device()
            raise_fuse_pages()
        raise_limits()
        return trio.run(serve, options, mountpoint, reporter, holding)
    finally:
        if holding is not None:
            holding.close()
