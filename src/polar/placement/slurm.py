"""Gateways in a Slurm job: a batch script with one on each node.

Slurm gives the job a last call before its time is over. It goes to the batch script alone, which tells each gateway,
and nothing else: agents go on while their gateway drains. The token is read on the nodes, from a file that only its
user can read; it is in no argument and in no variable of the job.
"""

from __future__ import annotations

import math
import shlex
from pathlib import Path

from polar.settings import ServeConfig

LAST_CALL = 300
"""Seconds before the end of the job in which gateways drain; more where ``limits.drain_seconds`` asks for it."""

_SCRIPT = r"""#!/bin/bash
# Gateways of Polar, one a node, for the rollout server {server}. Made by polar up --slurm.
#   sbatch polar.sbatch                     begin; polar must be in PATH
#   scancel --batch --signal=TERM JOB       drain and end (a plain scancel ends agents, too)
#SBATCH --job-name=polar-gateways
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:TERM@{last_call}
#SBATCH --no-kill
#SBATCH --output=polar-gateways-%j.log

# On each node. A gateway that breaks is begun again; one that has drained (0) or can't begin (2) is not.
# Its name and folder are the node's: a later job hands over what a lost one has left there.
gateway='
token_file={token_file}
case $(stat -L -c %a "$token_file") in 600|400) ;; *) echo "chmod 600 $token_file" >&2; exit 2;; esac
address=$(scontrol show node -o "$SLURMD_NODENAME" | sed "s/.* NodeAddr=\([^ ]*\).*/\1/")
running="${{TMPDIR:-/tmp}}/polar-$SLURM_JOB_ID-$SLURMD_NODENAME.pid"
trap : TERM
while :; do
  POLAR_NODE_TOKEN=$(cat "$token_file") polar serve -c {config} --role gateway --server {server} \
    --host 0.0.0.0 --public-url "{scheme}://$address:{port}" \
    --node-id "$SLURMD_NODENAME" --out {out}/"$SLURMD_NODENAME" &
  pid=$!
  echo "$pid" >"$running"
  while kill -0 "$pid" 2>/dev/null; do wait "$pid"; code=$?; done
  case $code in 0|2) rm -f "$running"; exit "$code";; esac
  echo "the gateway on $SLURMD_NODENAME has ended ($code); begun again" >&2
  sleep 5
done
'
drain='kill -TERM "$(cat "${{TMPDIR:-/tmp}}/polar-$SLURM_JOB_ID-$SLURMD_NODENAME.pid")"'

last_call() {{
  trap '' TERM
  srun --overlap --ntasks-per-node=1 bash -c "$drain" &
}}
trap last_call TERM
srun --label --no-kill --kill-on-bad-exit=0 bash -c "$gateway" &
step=$!
while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done
exit "$code"
"""


def script(config: ServeConfig, path: Path, token_file: Path, nodes: int) -> str:
    """A batch script for sbatch.

    Args:
        config: the settings of a gateway.
        path, token_file: the file of these settings, and that of the node token, as the nodes see them.
    """
    return _SCRIPT.format(
        nodes=nodes,
        last_call=max(LAST_CALL, math.ceil(config.limits.drain_seconds) + 60),
        server=_word(config.server or ""),
        config=_word(str(path)),
        token_file=_word(str(token_file)),
        out=_word(config.out),
        scheme="https" if config.tls else "http",
        port=config.port,
    )


def _word(text: str) -> str:
    """A word of the shell, inside of single quotes."""
    return shlex.quote(text).replace("'", "'\\''")
