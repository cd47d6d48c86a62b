"""What becomes of a job: its attempts, how each ended, and whether another one is worth making.

A batch script asks before and after every attempt (`podium attempt`); the answers depend on files of the job alone, so
they are the same after it has been queued again on other nodes.
"""

import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from podium.errors import UserError, system_reason, writing
from podium.machine.bounded_files import append_regular, open_regular, parse_mapping, read_limited, read_mapping
from podium.runs.folder import JOB
from podium.topology import Blocks, possible_instances

#: endings that another attempt would not change, and the one that asks for another
_FINAL, _SAVED = (0, 2, 3), 75
#: a node that lost instances this often gets no more of them
_LOSSES = 2
_LOG_BYTES, _MAX_ATTEMPTS, _RECORD_BYTES = 4 << 20, 20_000, 16 << 20

Action = Literal["end", "again", "requeue"]


class JobFacts(BaseModel):
    """What a job knows of its training from the start: `job.json`."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    num_replicas: PositiveInt
    num_stages: PositiveInt
    #: what blocks of replicas must be like (`topology.Blocks`)
    span: PositiveInt = 1
    alike: bool = False
    #: instances on each node, at most
    per_node: PositiveInt
    requeues: NonNegativeInt


class Attempt(BaseModel):
    """One start of the instances. Its end is missing if nobody was left to record it."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    began: float
    nodes: list[str]
    instances: PositiveInt
    #: where its part of the job's log begins
    log_from: NonNegativeInt = 0
    ended: float | None = None
    code: int | None = None
    #: of the newest checkpoint at its end
    updates: Annotated[int, Field(ge=0, lt=2**63)] = 0
    #: nodes that lost an instance
    lost: list[str] = []


@dataclass(frozen=True)
class Verdict:
    """What follows an attempt, and why, for people."""

    action: Action
    reason: str
    #: nodes that get no instances any more
    excluded: tuple[str, ...] = ()
    code: int = 0


def choose_instances(facts: JobFacts, num_nodes: int) -> tuple[int, int]:
    """Return the nodes to use and the instances on all of them together: the most that can carry the recipe."""
    best, blocks = (0, 0), Blocks(facts.span, facts.alike)
    for nodes in range(1, num_nodes + 1):
        for count in possible_instances(facts.num_replicas, facts.num_stages, nodes, blocks):
            if best[1] < count <= nodes * facts.per_node:
                best = (nodes, count)
    if not best[1]:
        raise UserError(
            f"{num_nodes} nodes with {facts.per_node} instances each cannot carry {facts.num_replicas} replicas of "
            f"{facts.num_stages} stages: ask for more of them"
        )
    return best


def excluded_nodes(attempts: Sequence[Attempt]) -> tuple[str, ...]:
    """Return the nodes that have lost instances twice."""
    losses = Counter(node for attempt in attempts for node in set(attempt.lost))
    return tuple(node for node, count in losses.items() if count >= _LOSSES)


def judge(facts: JobFacts, attempts: Sequence[Attempt], nodes: Sequence[str]) -> Verdict:
    """Return what follows the last attempt; `nodes` are those of the allocation that it was made in."""
    last, before = attempts[-1], attempts[:-1]
    if last.code in _FINAL:
        return Verdict("end", f"ended with exit code {last.code}", code=last.code)
    excluded = excluded_nodes(attempts)
    fresh = [node for node in excluded if node not in excluded_nodes(before)]
    why = _why(last, fresh)
    code = 3 if last.code is None else last.code
    if len(before) >= facts.requeues:
        most = f"{why}; it has started {len(attempts)} times, which is the most that is allowed"
        return Verdict("end", most, code=_SAVED if code == _SAVED else 3)
    if before and last.updates <= before[-1].updates and not fresh:
        made = f"update {last.updates:,} is all that was reached" if last.updates else "no update was saved"
        return Verdict("end", f"{why}; no progress since the attempt before ({made})", code=3)
    left = [node for node in nodes if node not in excluded]
    if code == _SAVED or not left or not _can_carry(facts, len(left)):
        return Verdict("requeue", why, excluded, code)
    return Verdict("again", why, excluded, code)


def _can_carry(facts: JobFacts, num_nodes: int) -> bool:
    try:
        return bool(choose_instances(facts, num_nodes))
    except UserError:
        return False


def _why(last: Attempt, fresh: Sequence[str]) -> str:
    if last.code is None:
        return f"nobody was left to say how the attempt on {', '.join(last.nodes)} has ended"
    if last.code == _SAVED:
        return f"stopped and saved after update {last.updates:,}"
    lost = f"an instance on {', '.join(last.lost)} was lost" if last.lost else f"ended with exit code {last.code}"
    named = f"; {', '.join(fresh)} has lost instances twice and is excluded from now on" if fresh else ""
    return f"{lost}{named}"


_LOST = (
    # `srun: error: node2: task 1: Killed`, `srun: error: node[1-2]: tasks 0-1: Terminated`
    re.compile(
        r"^srun: error: (?P<nodes>[\w.\[\],-]+): tasks? [\d,-]+: "
        r"(?:Killed|Segmentation fault|Bus error|Aborted|Out Of Memory)"
    ),
    re.compile(r"^srun: error: Node failure on (?P<nodes>[\w.\[\],-]+)"),
)


def lost_nodes(log: str) -> list[str]:
    """Return the nodes on which srun has seen an instance die, from what it printed."""
    found: list[str] = []
    for line in log.splitlines():
        for pattern in _LOST:
            if match := pattern.match(line):
                found += expand_nodes(match["nodes"])
    return sorted(set(found))


def expand_nodes(text: str) -> list[str]:
    """Return the names in Slurm's short form: `gpu[003-005,9],login` -> gpu003, gpu004, gpu005, gpu9, login."""
    names = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)?", text)[:10_000]:
        stem, _, rest = part.partition("[")
        numbers, _, end = rest.partition("]")
        for span in numbers.split(",") if rest else [""]:
            first, dash, last = span.partition("-")
            if dash and first.isdecimal() and last.isdecimal() and int(last) - int(first) < 10_000:
                width = len(first)
                names += [f"{stem}{number:0{width}d}{end}" for number in range(int(first), int(last) + 1)]
            else:
                names.append(f"{stem}{span}{end}")
    return names


_CHECKPOINT = re.compile(r"update-(\d+)")


def newest_update(run: Path) -> int:
    """Return the update of the newest checkpoint in a run's folder; 0 where there is none."""
    folder = run / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return max((int(match[1]) for name in names if (match := _CHECKPOINT.fullmatch(name))), default=0)


# --- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobFolder:
    """The folder of a job, or of one element of an array, whose facts lie one folder above."""

    path: Path

    @classmethod
    def of_element(cls, study: Path, number: int) -> "JobFolder":
        """Return that of one run of a study."""
        return cls(study / JOB / f"{number:04d}")

    @property
    def log_file(self) -> Path:
        return self.path / "log"

    @property
    def attempts_file(self) -> Path:
        return self.path / "attempts.jsonl"

    @property
    def cancelled(self) -> bool:
        """Whether somebody does not want it to go on."""
        return any((folder / "cancelled").exists() for folder in (self.path, self.path.parent))

    def facts(self) -> JobFacts:
        for folder in (self.path, self.path.parent):
            tree = read_mapping(folder / "job.json", "submit the job again")
            if tree is not None:
                try:
                    return JobFacts.model_validate(tree)
                except ValidationError:
                    raise UserError(f"{folder}/job.json is damaged: submit the job again") from None
        raise UserError(f"{self.path} is not the folder of a job (it has no job.json)")

    def attempts(self) -> list[Attempt]:
        """Return all attempts, each with its end where that was recorded."""
        try:
            lines = read_limited(self.attempts_file, _RECORD_BYTES).splitlines()[:_MAX_ATTEMPTS]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"{self.attempts_file} cannot be read: {system_reason(error)}") from None
        found: list[Attempt] = []
        for line in lines:
            try:
                tree = parse_mapping(line)
                if "nodes" in tree:
                    found.append(Attempt.model_validate(tree))
                elif found:
                    found[-1] = Attempt.model_validate({**found[-1].model_dump(), **tree})
            except ValueError:
                continue  # a line that was half written when a node went down
        return found

    def add(self, record: Mapping[str, object]) -> None:
        """Add a line to the record of attempts."""
        with writing(self.attempts_file):
            self.path.mkdir(parents=True, exist_ok=True)
            with append_regular(self.attempts_file) as file:
                file.write(json.dumps(record).encode() + b"\n")

    def settle(self, updates: int) -> Verdict | None:
        """Record the end of an attempt whose node went down, or whose script was killed, before it could: the
        scheduler has started the job again by itself. Return what follows, None where nothing was left to settle."""
        attempts = self.attempts()
        if not attempts or attempts[-1].ended is not None:
            return None
        end = {"ended": time.time(), "updates": updates}
        self.add(end)
        attempts[-1] = Attempt.model_validate({**attempts[-1].model_dump(), **end})
        return judge(self.facts(), attempts, attempts[-1].nodes)

    def begin(self, nodes: Sequence[str]) -> tuple[int, list[str]]:
        """Record that an attempt begins; return its number of instances and the nodes that carry them."""
        attempts, facts = self.attempts(), self.facts()
        excluded = excluded_nodes(attempts)
        usable = [node for node in nodes if node not in excluded] or list(nodes)
        num_nodes, count = choose_instances(facts, len(usable))
        log_from = self.log_file.stat().st_size if self.log_file.exists() else 0
        self.add({"began": time.time(), "nodes": usable[:num_nodes], "instances": count, "log_from": log_from})
        return count, usable[:num_nodes]

    def end(self, code: int, updates: int, nodes: Sequence[str]) -> Verdict:
        """Record how an attempt has ended; return what follows."""
        attempts = self.attempts()
        if not attempts:
            raise UserError(f"{self.path}: an attempt has ended that nobody began")
        final = code in (*_FINAL, _SAVED)
        lost = [] if final else lost_nodes(self._log_since(attempts[-1].log_from))
        end = {"ended": time.time(), "code": code, "updates": updates, "lost": lost}
        self.add(end)
        attempts[-1] = Attempt.model_validate({**attempts[-1].model_dump(), **end})
        verdict = judge(self.facts(), attempts, nodes)
        if self.cancelled and verdict.action != "end":
            return Verdict("end", "cancelled", code=code)
        return verdict

    def _log_since(self, start: int) -> str:
        try:
            with open_regular(self.log_file) as file:
                file.seek(start)
                return file.read(_LOG_BYTES).decode(errors="replace")
        except OSError:
            return ""
