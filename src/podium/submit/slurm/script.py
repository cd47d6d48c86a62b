"""The batch script of a job: for people to read, and for any shell to run as it is meant. Pure.

All words that come from recipes, sites and command lines are quoted by `shlex`; the values of secrets are in Slurm's
environment of the job, and are never part of it.
"""

import shlex
from collections.abc import Sequence

from podium import __version__
from podium.errors import UserError
from podium.submit.site import Site
from podium.submit.slurm.shape import Shape

_BODY = r"""
set -u
{settings}
# The command of Podium, and the folders of this job and of its run.
podium=({podium})
{folders}

# Signals ask the instances to save: USR1 comes from Slurm before the time is used up, TERM when the nodes are needed.
step="" heard=""
trap 'heard=yes; [ -z "$step" ] || kill -USR1 "$step" 2>/dev/null' USR1
trap 'heard=yes' TERM   # the instances have it from Slurm, too

bind=()
if scontrol show config 2>/dev/null | grep -Eq '^TaskPlugin .*(affinity|cgroup)'; then bind=(--cpu-bind=cores); fi
nodes=$(scontrol show hostnames | tr '\n' ' ')

while :; do
    # Which command, then options of srun: as many instances as these nodes can carry.
    mapfile -t answer < <("${{podium[@]}}" attempt begin "$job" "$run" --nodes "$nodes")
    case ${{answer[0]-}} in
    train) words=(train "$recipe" --out "$run") ;;
    resume) words=(resume "$run") ;;
    done) exit 0 ;;
    *) exit 3 ;;
    esac
    code=75   # asked to stop before anything was started
    if [ -z "$heard" ]; then
        srun "${{answer[@]:1}}" {srun} "${{bind[@]}}" "${{podium[@]}}" "${{words[@]}}" &
        step=$!
        again=yes
        while [ -n "$again" ]; do   # a signal ends `wait`, not the step
            heard=""
            wait "$step"
            ended=$?
            again=$heard
            [ "$ended" -eq 127 ] || code=$ended
        done
    fi
    step=""
    state=$(squeue -h -j "$SLURM_JOB_ID" -o %T 2>/dev/null)

    # What follows: 0, 2 and 3 are final; 75 goes back into the queue; lost instances start again.
    mapfile -t answer < <("${{podium[@]}}" attempt end "$job" "$run" "$code" --nodes "$nodes")
{collect}    case ${{answer[0]-}} in
    again) [ "$state" = COMPLETING ] || continue ;;
    requeue) [ "$state" = COMPLETING ] || break ;;
    *) exit "${{answer[1]-$code}}" ;;
    esac
    exit "$code"   # somebody has ended the job: what is saved can be continued with `podium resume`
done

trap '' TERM USR1   # Slurm ends this script as it puts the job back
scontrol requeue "$SLURM_JOB_ID" || exit "$code"
changes=({wishes})
[ -z "${{answer[2]-}}" ] || changes+=("ExcNodeList=${{answer[2]}}")
for _ in 1 2 3 4 5 6 7 8 9 10; do
    [ "${{#changes[@]}}" -gt 0 ] || break
    scontrol update "JobId=$SLURM_JOB_ID" "${{changes[@]}}" && break
    sleep 1
done
exit "$code"
"""

_ONE_RUN = """run={run}
job={job}
recipe={recipe}"""

#: `SLURM_ARRAY_TASK_ID` is the number of a run in the study
_ELEMENT = """study={run}
number=$(printf %04d "$SLURM_ARRAY_TASK_ID")
run=$study/runs/$number
job=$study/job/$number
recipe=$study/recipes/$number.yaml"""

_SENT = """
# The study was sent here: its first element writes the recipes of all.
"${podium[@]}" attempt prepare "$study" || exit 3"""

_COLLECT = """    case ${answer[0]-} in
    end) "${podium[@]}" attempt collect "$study" ;;
    esac
"""


def batch_script(
    title: str,
    site: Site,
    shape: Shape,
    podium: Sequence[str],
    folder: str,
    *,
    array: bool,
    requeues: int,
    sent: bool = False,
) -> str:
    """Return the script of a job that trains in `folder`; `array`: a run of the study there in each element, which was
    `sent` from another machine or begun there."""
    directives = "\n".join(f"#SBATCH --{line}" for line in _directives(site, shape, requeues))
    job = f"{folder}/job"
    places = {"run": folder, "job": job, "recipe": f"{job}/recipe.yaml"}
    folders = (_ELEMENT if array else _ONE_RUN).format(**{key: shlex.quote(path) for key, path in places.items()})
    srun = [*site.slurm.srun, "--kill-on-bad-exit=0", "--distribution=block", f"--cpus-per-task={shape.cores_each}"]
    # Instances that share devices see all of their node, and take theirs by their place.
    srun += ["--gpus-per-task=1", "--gpu-bind=single:1"] if shape.devices_per_node and shape.per_device == 1 else []
    body = _BODY.format(
        settings=_settings(site),
        podium=shlex.join(podium),
        folders=folders + (_SENT if array and sent else ""),
        srun=shlex.join(srun),
        collect=_COLLECT if array else "",
        wishes=_wishes(shape),
    )
    head = f"#!/bin/bash\n# {title}\n# Written by `podium submit slurm` of Podium {__version__}."
    return f"{head}\n{directives}\n{body}"


def _directives(site: Site, shape: Shape, requeues: int) -> list[str]:
    slurm = site.slurm
    least, most = shape.nodes
    named = {
        "account": slurm.account,
        "partition": slurm.partition,
        "qos": slurm.qos,
        "reservation": slurm.reservation,
        "constraint": slurm.constraint,
    }
    lines = [f"{key}={value}" for key, value in named.items() if value is not None]
    lines += [f"nodes={least}" if least == most else f"nodes={least}-{most}"]
    lines += [f"ntasks-per-node={shape.per_node}", f"cpus-per-task={shape.cores_each}", f"time={shape.minutes}"]
    if shape.devices_per_node:
        per_node = shape.devices_per_node
        lines.append(f"gres=gpu:{per_node}" if slurm.devices_as == "gres" else f"gpus-per-node={per_node}")
    lines += [f"signal=B:USR1@{shape.lead_s}", "open-mode=append", "requeue" if requeues else "no-requeue"]
    # sbatch itself reads these lines, with quotes as in a shell.
    return lines + [f"{name}={_in_quotes(value)}" for name, value in slurm.options.items()]


def _wishes(shape: Shape) -> str:
    """Return what to ask for anew: Slurm would otherwise want as many nodes as the first time."""
    least, most = shape.nodes
    if least == most:
        return ""
    tasks, cores = least * shape.per_node, shape.per_node * shape.cores_each
    return f"NumNodes={least}-{most} NumTasks={tasks} NumCPUs={least * cores}-{most * cores}"


def _in_quotes(value: str) -> str:
    if '"' in value or "\\" in value:
        raise UserError(f"slurm.options: {value!r} has quotes or backslashes, which sbatch cannot read in a script")
    return value if value.replace("-", "").replace("_", "").isalnum() else f'"{value}"'


def _settings(site: Site) -> str:
    lines = []
    if site.modules:
        lines.append(f"module load {shlex.join(site.modules)}")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in site.environment.items()]
    variables = {"cache": "PODIUM_CACHE", "temporary": "TMPDIR"}
    for kind, path in site.scratch.items():
        lines += [f"export {variables[kind]}={shlex.quote(path)}", f'mkdir -p "${variables[kind]}"']
    return "\n".join(["# The site.", *lines, ""]) if lines else ""
