"""The table of failures against what processes write: errors of storage and hosts, lost workers and peers, devices, loss, mistakes."""

from collections import Counter
from pathlib import Path

import pytest
import yaml

from tula_cli.host.failure_texts import classify_failure, find_line_of_failure
from tula_cli.host.failures import FAILURE_KINDS, describe_advice

ROWS = yaml.safe_load((Path(__file__).parents[1] / "fixtures" / "failure_texts.yaml").read_text())
MEMORY = ("host_oom", "device_oom")
COUNTED_BY_KERNEL = [row for row in ROWS if "oom_kills" in row]


@pytest.mark.promise(
    "a process",
    "a rank fails because of a file system, a limit of the host, a lost worker or peer, a device, or a loss that is not finite",
    "tula recognises the cause, whatever the last line of the traceback is. It does not mistake a bug in the script"
    " for such a failure",
)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['expect']}: {row['name']}")
def test_each_text_has_its_class(row: dict[str, str]) -> None:
    expected = "signal" if "oom_kills" in row else row["expect"]  # the kernel's count is the supervisor's evidence
    exit_code, device = row.get("exit_code", 1), row.get("device", "cuda")
    assert classify_failure(row["text"], exit_code=exit_code, device=device) == expected
    prefixed = "".join(f"[rank5]: {line}\n" for line in row["text"].splitlines())
    assert classify_failure(prefixed, exit_code=exit_code, device=device) == expected


def test_the_table_is_large_enough() -> None:
    classes = Counter(row["expect"] for row in ROWS)
    assert classes["user"] >= 50 and sum(classes.values()) - classes["user"] >= 150
    assert len({row["name"] + row["text"] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row["expect"] in ("storage", "host_limit", "diverged")], ids=lambda row: row["name"]
)
def test_one_line_tells_what_failed(row: dict[str, str]) -> None:
    line = find_line_of_failure(row["text"])
    assert line and line in row["text"]


def test_what_an_epoch_ago_was_logged_does_not_decide_what_a_kill_is() -> None:
    log = "loss is nan, stopping at epoch 3 was considered\nOSError: [Errno 5] Input/output error, trying again\nepoch 4 loss 0.3\n"
    assert classify_failure(log, exit_code=-9) == "signal"
    assert classify_failure(log, exit_code=143) == "signal"


def test_limits_name_the_setting() -> None:
    assert "ulimit -n" in describe_advice("host_limit") and FAILURE_KINDS["host_limit"].error.exit_code == 6
