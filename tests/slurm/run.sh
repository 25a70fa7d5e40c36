#!/usr/bin/env bash
# Real Slurm on this machine: one controller and two nodes, then scenarios.py with runs on CPU ranks.
#
#   bash tests/slurm/run.sh [--output FILE] [--only NAME ...]
#
# Needs root: Debian's slurm-wlm and munge are installed where they are missing, and the nodes' names are in /etc/hosts
# while it runs. All else lies in a temporary folder. pytest does not collect it.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
work=$(mktemp -d /tmp/distca-slurm.XXXXXX)
export SLURM_CONF=$work/slurm.conf PYTHONPATH=$root OMP_NUM_THREADS=1
started=()

end_with_children() {
    local child
    for child in $(pgrep --parent "$1"); do end_with_children "$child"; done
    kill -KILL "$1" 2>/dev/null || true
}

finish() {
    for process in "${started[@]}"; do kill "$process" 2>/dev/null || true; done
    for file in "$work"/*.pid; do kill "$(cat "$file" 2>/dev/null)" 2>/dev/null || true; done
    wait || true
    # What is left of jobs: a slurmstepd outlives its slurmd, whose log it has open, and its tasks live as long as it does.
    for process in $(pgrep slurmstepd); do
        ls -l "/proc/$process/fd" 2>/dev/null | grep -q "$work/" && end_with_children "$process"
    done
    sed -i '/# distca-slurm$/d' /etc/hosts 2>/dev/null || { grep -v '# distca-slurm$' /etc/hosts >"$work/hosts"; cat "$work/hosts" >/etc/hosts; }
}
trap finish EXIT

if ! command -v slurmctld >/dev/null || ! command -v munged >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge
fi

host=$(hostname -s)
mkdir -p "$work"/{state,spool-n0,spool-n1,munge}
chmod 755 "$work"
cat >"$SLURM_CONF" <<CONF
ClusterName=distca
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=17817
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$work/munge/socket
CredType=cred/munge
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool-%n
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd-%n.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd-%n.log
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=90
SlurmdTimeout=10
MinJobAge=3600
NodeName=n0 NodeHostname=$host NodeAddr=127.0.0.1 Port=17818 CPUs=8
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=17819 CPUs=8
PartitionName=low Nodes=n0,n1 Default=YES PriorityTier=1 GraceTime=120 MaxTime=INFINITE
PartitionName=high Nodes=n0,n1 PriorityTier=2 PreemptMode=OFF MaxTime=INFINITE
CONF
grep -q '# distca-slurm$' /etc/hosts || echo "127.0.0.1 n0 n1 # distca-slurm" >>/etc/hosts

dd if=/dev/urandom of="$work/munge/key" bs=1024 count=1 status=none
chmod 600 "$work/munge/key"
munged --foreground --force --socket="$work/munge/socket" --key-file="$work/munge/key" \
    --pid-file="$work/munge/munged" --log-file="$work/munge/log" --seed-file="$work/munge/seed" 2>"$work/munge/out" &
started+=($!)
sleep 1
chmod 755 "$work/munge"
slurmctld -D >"$work/slurmctld.out" 2>&1 &
started+=($!)
for node in n0 n1; do
    slurmd -D -N "$node" >"$work/$node.out" 2>&1 &
done
for _ in {1..60}; do
    [[ $(sinfo --noheader --format=%T 2>/dev/null) == idle ]] && break
    sleep 1
done
sinfo
cd "$root"
source scripts/python.sh 2>/dev/null || true
python=$root/.venv/bin/python
[[ -x $python ]] || python=python
"$python" -m tests.slurm.scenarios --folder "$work/runs" "$@"
