#!/usr/bin/env bash
# Runs the tests that start a Ray cluster and, beside them, all others; then tells the coverage.
# Usage: run_tests.sh PYTHON
#
# The tests of a cluster wait much of the time, for processes that start and for disks, and the
# others use one core. There are two processes, not more: only one may start clusters, as several
# of them would not keep their deadlines on two cores.
set -uo pipefail
python=$1
said=$(mktemp)
others=

end() {
  # SIGINT lets its fixtures end what they started.
  [ -z "$others" ] || { kill -INT "$others" && wait "$others"; } 2>/dev/null
  rm -f "$said"
}
trap end EXIT

run() { # NAME MARKER: the tests that fit, with their coverage in a file of its own
  COVERAGE_FILE=.coverage-$1 "$python" -m pytest --cov --cov-report= -m "$2" tests
}

rm -f .coverage .coverage-*
run others "not cluster" >"$said" 2>&1 &
others=$!
echo "tests that start a Ray cluster; what the others say comes after them"
run cluster cluster
status=$?
wait "$others" || status=$?
others=
echo "tests that start none"
cat "$said"
"$python" -m coverage combine -q .coverage-others .coverage-cluster
"$python" -m coverage report --skip-covered --fail-under=85 || status=$?
exit "$status"
