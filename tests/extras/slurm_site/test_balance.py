"""The balance of an account, from recorded output of `scontrol show assoc_mgr`."""

import pytest
from accounting_recorded import RecordedSlurm
from make_runs import spec

from tula_cli.extras.slurm_site.balance import read_account_balance
from tula_cli.extras.slurm_site.billing import get_user_name
from tula_cli.spec.slurm_options import Slurm as Slurm_

SPEC = spec(cluster={"kind": "slurm", "slurm": {"account": "proj", "qos": "dear"}}, pricing={"kind": "billing"})


def lefts(result):
    return {(limit.where, limit.tres): limit.remaining for limit in result.limits}


def test_every_limit_from_the_user_to_the_root_and_of_the_qos():
    account_balance = read_account_balance(SPEC, qos="dear", ask=RecordedSlurm(get_user_name()))
    assert lefts(account_balance) == {
        (f"{get_user_name()} in account proj", "cpu"): 52,
        ("account proj", "billing"): 1000 - 19 - 40,
        ("account big", "cpu"): 492,
        ("account big", "billing"): 100 - 19 - 40,
        ("QOS dear", "billing"): 298,
    }
    assert account_balance.unseen == ""


def test_what_nobody_shows_is_said_and_no_error():
    account_balance = read_account_balance(SPEC, qos="dear", ask=RecordedSlurm(get_user_name(), without=["assoc_mgr"]))
    assert account_balance.limits == ()
    assert "access denied" in account_balance.unseen
    silent = read_account_balance(
        SPEC.model_copy(update={"cluster": SPEC.cluster.model_copy(update={"slurm": None})}),
        qos="",
        ask=RecordedSlurm(get_user_name(), without=["sacctmgr"]),
    )
    assert "does not report the account" in silent.unseen


def test_a_qos_that_is_not_shown_is_said_beside_what_is():
    account_balance = read_account_balance(SPEC, qos="dear", ask=RecordedSlurm(get_user_name(), without=["flags=qos"]))
    assert ("account proj", "billing") in lefts(account_balance)
    assert "QOS dear is not shown" in account_balance.unseen
    assert read_account_balance(SPEC, qos="nix", ask=RecordedSlurm(get_user_name())).unseen == "QOS nix is not shown"


def test_names_are_read_as_slurm_reads_them_and_variables_of_sbatch_count(monkeypatch):
    def asked(**slurm):
        return SPEC.model_copy(update={"cluster": SPEC.cluster.model_copy(update={"slurm": Slurm_(**slurm)})})

    assert read_account_balance(
        asked(account="Proj"), qos="Dear", ask=RecordedSlurm(get_user_name())
    ) == read_account_balance(SPEC, qos="dear", ask=RecordedSlurm(get_user_name()))
    monkeypatch.setenv("SBATCH_ACCOUNT", "big")
    assert read_account_balance(asked(), qos="", ask=RecordedSlurm(get_user_name())).account == "big"
    assert read_account_balance(asked(account="proj"), qos="", ask=RecordedSlurm(get_user_name())).account == "proj"


@pytest.mark.parametrize("account", ["hidden"])
def test_an_account_that_is_not_shown(account):
    slurm = SPEC.cluster.slurm.model_copy(update={"account": account})
    requested = SPEC.model_copy(update={"cluster": SPEC.cluster.model_copy(update={"slurm": slurm})})
    assert (
        read_account_balance(requested, qos="", ask=RecordedSlurm(get_user_name())).unseen
        == "SLURM does not show account hidden; PrivateData in slurmdbd.conf may hide it"
    )
