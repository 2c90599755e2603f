"""Charge factors of names that the site has not."""

import make_runs
from read_diagnostics import codes

from tula_cli.cluster.slurm.command import CommandResult
from tula_cli.cluster.slurm.site_factors import warn_unknown_factors

FACTORS = {"qos_factors": {"DEAR": 3, "premum": 2}, "partition_factors": {"gpu": 2, "GPU": 2, "x": 0.5}}


class Site:
    """SLURM's answers; `silent` names commands that fail."""

    def __init__(self, *silent):
        self.silent, self.asked = silent, []

    def __call__(self, *command, patience):
        self.asked.append(command[0])
        if command[0] in self.silent:
            return CommandResult("failed", complaint="refused")
        return CommandResult("done", {"sacctmgr": "normal\ndear\npremium", "sinfo": "gpu\ndebug\n"}[command[0]])


def job(kind="slurm", **factors):
    return make_runs.spec(cluster={"kind": kind}, pricing={"kind": "billing", **factors})


def test_names_that_slurm_does_not_know_are_reported_with_the_nearest():
    warnings = warn_unknown_factors(job(**FACTORS), ask=Site())
    assert set(codes(warnings)) == {"unknown-pricing-factor"}
    assert [tuple(warning.values.values()) for warning in warnings] == [
        ("pricing.qos_factors", "QOS", "premum", 2, "did you mean premium?"),
        ("pricing.partition_factors", "partition", "GPU", 2, "did you mean gpu?"),
        ("pricing.partition_factors", "partition", "x", 0.5, "there are: gpu, debug"),
    ]


def test_where_slurm_does_not_answer_nothing_is_said():
    assert warn_unknown_factors(job(**FACTORS), ask=Site("sacctmgr", "sinfo")) == []
    (message, _) = warn_unknown_factors(job(**FACTORS), ask=Site("sacctmgr"))
    assert message.values["name"] == "GPU"


def test_nobody_is_asked_without_factors_or_without_slurm():
    site = Site()
    assert warn_unknown_factors(job(), ask=site) == warn_unknown_factors(job("local", **FACTORS), ask=site) == []
    assert site.asked == []
