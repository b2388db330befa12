#!/usr/bin/env bash
# Training on the GPUs of one node, or on one of several nodes. All arguments are eagle-train's overrides.
# Usage: bash launch/torchrun.sh experiment=... parallel=fsdp2 ...
#   COMMAND     eagle-cache to write the target's states instead
#   PROCESSES   on this node; by default one for each GPU, or one
#   NODES       in the job (1); with more, start the same line on each node with
#   MASTER      HOST:PORT of one of them that all reach, and
#   JOB         a name that is theirs alone (eagle)
#   GRACE       seconds that the processes have to write a checkpoint after SIGTERM, SIGINT, SIGHUP or SIGUSR1 (900)
. "$(dirname "$0")/setup.sh"
if [ "${NODES:-1}" -gt 1 ] && ! is_set_up; then
  echo "error: NODES=$NODES: ${VENV:-.venv} is not set up, and all nodes would do it at once; run 'bash launch/setup.sh' once" \
    "(on each node, if they share no disk), then start again" >&2
  exit 1
fi
set_up
processes="${PROCESSES:-$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')}"
if [ "${NODES:-1}" -gt 1 ]; then
  : "${MASTER:?error: NODES=$NODES needs MASTER=HOST:PORT}"
  rendezvous=(--nnodes "$NODES" --rdzv-backend c10d --rdzv-endpoint "$MASTER" --rdzv-id "${JOB:-eagle}")
else
  rendezvous=(--standalone)
fi
# A log for each rank, if LOGS names a directory; errors are shown here in any case, the first rank's output too.
[ -z "${LOGS:-}" ] || rendezvous+=(--log-dir "$LOGS" --redirects 3 --tee 3)
# A signal is passed on, and the ranks have time to write their checkpoint; SIGQUIT ends them at once.
grace=(--signals-to-handle "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1" --shutdown-timeout "${GRACE:-900}")
exec torchrun "${rendezvous[@]}" "${grace[@]}" --nproc-per-node "$processes" --no-python "${COMMAND:-eagle-train}" "$@"
