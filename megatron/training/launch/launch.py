# SPDX-License-Identifier: Apache-2.0
"""Place of this process in the job, from the environment that the launcher made.

| launcher                     | variables                                                                          |
|------------------------------|------------------------------------------------------------------------------------|
| torchrun, any PyTorch script | RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT                                 |
| srun, sbatch                 | SLURM_PROCID SLURM_NTASKS SLURM_LOCALID SLURM_JOB_NODELIST, when the above are absent |
| plain python                 | none: one process, no port is opened                                               |

Pure functions over a mapping, without torch, so that a mistake in the environment is reported at once.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from megatron.core.errors import ConfigError, MegatronError, command_line, tell_launcher

DEFAULT_PORT = 29500
# Long enough for a launcher to notice that rank 0 has ended and to stop the other processes.
RANK_0_SPEAKS_FIRST_SECONDS = 5.0
# A bound that no job reaches; it keeps a slip of the keyboard from becoming a request for memory.
_LARGEST_WORLD = 10_000_000


@dataclass(frozen=True)
class Launch:
    """This process's rank and where the processes of the job meet."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    agent_store: bool = False
    """torchrun's agent already serves the meeting point; rank 0 need not open it."""
    attempt: int = 0
    """Number of times that torchrun has restarted the job: an earlier attempt's messages are not ours."""
    beginning: int = 0
    """Number of times that the job has begun again inside its processes since."""
    leads_host: bool | None = None
    """True for the one process that acts for all of the job on its host; None: local rank 0."""
    job: str = "N/A"
    """SLURM's id of the job."""
    whole: Launch | None = None
    """Place among the ranks of all sites, where this job is one of several sites that were started as one job."""
    node: str = "0"
    """Number of this node among the launcher's (torchrun's agents, SLURM's nodes), where it says so."""

    @property
    def is_first_of_host(self) -> bool:
        """True for one of the processes of the job on each host."""
        return self.local_rank == 0 if self.leads_host is None else self.leads_host


def read_launch(environ: Mapping[str, str]) -> Launch:
    """The launch that `environ` describes. Raises ConfigError that names each variable that cannot be used."""
    # RANK decides: torchrun started inside of a SLURM job sets it, and the SLURM variables then describe torchrun
    # itself. WORLD_SIZE alone is what some SLURM scripts export for the program to read.
    launch = Launch()
    if "RANK" in environ or ("WORLD_SIZE" in environ and "SLURM_PROCID" not in environ):
        launch = _read_torchrun_launch(environ)
    elif "SLURM_PROCID" in environ and "SLURM_NTASKS" in environ:
        launch = _read_slurm_launch(environ)
    node = environ.get("GROUP_RANK", environ.get("SLURM_NODEID", launch.node))
    return dataclasses.replace(launch, job=environ.get("SLURM_JOB_ID", launch.job), node=node)


def add_world_size(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with WORLD_SIZE also where only SLURM says how many processes there are."""
    if "WORLD_SIZE" in environ or "SLURM_PROCID" not in environ or "SLURM_NTASKS" not in environ:
        return dict(environ)
    return {**environ, "WORLD_SIZE": environ["SLURM_NTASKS"]}


def _read_torchrun_launch(environ: Mapping[str, str]) -> Launch:
    problems: list[str] = []
    world_size = _read_whole_number(environ, "WORLD_SIZE", problems, minimum=1)
    if world_size is None and "WORLD_SIZE" not in environ:
        problems.append(
            "RANK is set but WORLD_SIZE is missing from the environment; start with torchrun, or unset RANK"
        )
    rank = _read_whole_number(environ, "RANK", problems)
    if rank is None and "RANK" not in environ:
        if world_size == 1:
            rank = 0
        else:
            problems.append(
                f"WORLD_SIZE={environ['WORLD_SIZE']} but RANK is missing from the environment; start with torchrun, "
                "or unset WORLD_SIZE to train in one process"
            )
    local_rank = _read_whole_number(environ, "LOCAL_RANK", problems)
    if world_size is not None and rank is not None and rank >= world_size:
        problems.append(f"RANK={rank} is not below WORLD_SIZE={world_size}; ranks count from 0 to {world_size - 1}")
    if problems:
        raise ConfigError(problems)
    assert rank is not None and world_size is not None
    if world_size == 1:
        return Launch(local_rank=local_rank or 0)
    addr, port = _read_meeting_point(environ)
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=rank if local_rank is None else local_rank,
        master_addr=addr,
        master_port=port,
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        # A value that cannot be read is torchrun's affair, so its problem goes to a list that is not read.
        attempt=_read_whole_number(environ, "TORCHELASTIC_RESTART_COUNT", []) or 0,
    )


def _read_meeting_point(environ: Mapping[str, str]) -> tuple[str, int]:
    problems: list[str] = []
    port = _read_whole_number(environ, "MASTER_PORT", problems, minimum=1, maximum=65535)
    problems += [
        f"{name} is missing from the environment; it is needed with WORLD_SIZE={environ['WORLD_SIZE']}; "
        "start with torchrun, or set it to the host and port of rank 0"
        for name in ("MASTER_ADDR", "MASTER_PORT")
        if not environ.get(name)
    ]
    if problems:
        raise ConfigError(problems)
    assert port is not None
    return environ["MASTER_ADDR"], port


def _read_slurm_launch(environ: Mapping[str, str]) -> Launch:
    problems: list[str] = []
    world_size = _read_whole_number(environ, "SLURM_NTASKS", problems, minimum=1)
    rank = _read_whole_number(environ, "SLURM_PROCID", problems)
    local_rank = _read_whole_number(environ, "SLURM_LOCALID", problems)
    port = _read_whole_number(environ, "MASTER_PORT", problems, minimum=1, maximum=65535)
    if world_size is not None and rank is not None and rank >= world_size:
        problems.append(f"SLURM_PROCID={rank} is not below SLURM_NTASKS={world_size}")
    # The nodes of the step, which may be some of the job's: rank 0 runs on the first of them.
    host = environ.get("MASTER_ADDR") or find_first_host(
        environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    )
    if world_size is not None and world_size > 1 and not host:
        problems.append(
            f"SLURM_JOB_NODELIST={environ.get('SLURM_JOB_NODELIST', '')!r} names no host, which is needed with "
            f"SLURM_NTASKS={world_size}; set MASTER_ADDR to the host of rank 0"
        )
    if problems:
        raise ConfigError(problems)
    assert rank is not None and world_size is not None
    if world_size == 1:
        return Launch(local_rank=local_rank or 0)
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=rank if local_rank is None else local_rank,
        master_addr=host,
        master_port=port or DEFAULT_PORT,
    )


def find_first_host(nodelist: str) -> str | None:
    """First host of a SLURM node list: "gpu[003-006,9],login1" -> "gpu003". None when there is none."""
    match = re.match(r"\s*([^,\[\s]+)(?:\[([0-9]+)[^\]]*\]([^,\[\s]*))?", nodelist)
    if match is None:
        return None
    prefix, number, suffix = match.groups()
    return prefix + (number or "") + (suffix or "")


def _read_whole_number(
    environ: Mapping[str, str], name: str, problems: list[str], *, minimum: int = 0, maximum: int = _LARGEST_WORLD
) -> int | None:
    """The variable as a number in range; None, with a sentence in `problems`, when it is there but is not one."""
    text = environ.get(name)
    if text is None:
        return None
    # int() would also take "1_0", " 10 " and digits of other scripts.
    if not re.fullmatch(r"[0-9]{1,9}", text) or not minimum <= int(text) <= maximum:
        problems.append(
            f"environment variable {name}={text[:40]!r} is not a whole number from {minimum}"
            + (f" to {maximum}" if maximum < _LARGEST_WORLD else " up")
        )
        return None
    return int(text)


def run_job(main: Callable[[], int | None], environ: Mapping[str, str]) -> int:
    """Call `main` and return the exit code; a MegatronError becomes one `error:` line for the whole job.

    Most errors are the same on every rank: rank 0 says them at once. The others wait a moment before they say theirs,
    with their rank; by then the launcher has ended them, unless the error was theirs.
    """

    def patient_main() -> int | None:
        try:
            return main()
        except MegatronError as error:
            # Read from the environment once more: the error may be that read_launch could not use it.
            rank = environ.get("RANK") or environ.get("SLURM_PROCID") or "0"
            if rank.isdecimal() and int(rank) > 0:
                _sign(error, rank)
                # Before rank 0 loses this peer, and after it has had the same error.
                tell_launcher(error, RANK_0_SPEAKS_FIRST_SECONDS / 2)
                time.sleep(RANK_0_SPEAKS_FIRST_SECONDS)
            raise

    return command_line(patient_main)()


def leave(exit_code: int) -> NoReturn:
    """End the process with this code, without the interpreter's clean-up.

    A thread of a process group may hold the last reference to a tensor for a moment. If it asks for the interpreter
    during clean-up, Python before 3.14 ends it, which aborts the process after a run that has succeeded. After a
    failure, groups whose peers are gone could abort it (and lose its exit code) or wait for them for ever.
    """
    # What libraries registered at exit (flushing a log, for example) is part of a run that succeeded.
    if exit_code == 0:
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed pipe, a full disk
            stream.flush()
    os._exit(exit_code)


def _sign(error: MegatronError, rank: str) -> None:
    # A ConfigError prints its list of problems, other errors their text.
    if isinstance(error, ConfigError):
        error.problems = [_name_rank(problem, rank) for problem in error.problems]
    error.args = (_name_rank(str(error), rank),)


def _name_rank(sentence: str, rank: str) -> str:
    # Some sentences begin with the rank, because others are told of it.
    return sentence if re.match(rf"rank {rank}\b", sentence) else f"rank {rank}: {sentence}"
