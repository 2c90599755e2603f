"""The billing of a job, from recorded output of SLURM; tests/slurm/test_bill.py asks a real one."""

import pytest
from accounting_recorded import CONFIG, NODE, NODE_24_11, PARTITION_24_11, RecordedSlurm
from make_runs import spec

from tula_cli.cluster.slurm.command import parse_record
from tula_cli.errors import SpecError
from tula_cli.extras.slurm_site import SlurmSite
from tula_cli.extras.slurm_site.billing import CACHE_FOLDER, MAX_CACHE_AGE_SECONDS, find_job_billing, get_user_name
from tula_cli.models.cost import compute_cost, compute_hourly_charge, compute_max_cost, describe_price
from tula_cli.services.site_charges import add_site_billing


def job(*, gpus=1, device="cpu", pricing=None, **slurm):
    cluster = {"kind": "slurm", "device": device, "gpus_per_node": gpus, "slurm": slurm}
    return spec(cluster=cluster, pricing={"kind": "billing", **(pricing or {})})


def billed(requested, ask=None, root=None):
    return add_site_billing(requested, root, site_billing=SlurmSite(ask or RecordedSlurm(get_user_name()))).pricing


# What `sacct` showed of real jobs that asked for the same (AllocTRES billing=).
@pytest.mark.parametrize(
    ("asked", "nodes", "billing"),
    [
        (job(partition="billed", memory="1500M"), 2, 10),
        (job(partition="billed"), 1, 5),
        (job(partition="half", exclusive=False), 1, 0),
        (job(partition="billed", exclusive=False, memory="0", device="cuda"), 1, 2),
        (job(partition="half"), 2, 1),
        (job(partition="billed,half", exclusive=False), 1, 1),
        (job(), 2, 4),
    ],
)
def test_a_job_is_billed_what_slurm_billed_it(asked, nodes, billing):
    assert compute_hourly_charge(billed(asked), nodes) == billing


@pytest.mark.parametrize(
    ("asked", "memory"),
    [
        (job(partition="billed"), 1000),  # DefMemPerCPU x both CPUs
        (job(partition="half"), 2000),  # DefMemPerNode of the partition
        (job(partition="billed", memory="0"), 4000),
        (job(partition="billed", extra={"mem-per-cpu": "1G"}), 2048),
        (job(partition="billed", exclusive=False, cpus_per_task=2, gpus=1), 1000),
    ],
)
def test_memory_is_what_is_asked_for_else_what_the_partition_gives(asked, memory):
    assert find_job_billing(asked, None, ask=RecordedSlurm(get_user_name())).tres["mem"] == memory


def test_a_newer_slurm_with_typed_gpus_and_whole_nodes_by_the_partition():
    ask = RecordedSlurm(
        get_user_name(), config="PriorityFlags = MAX_TRES_GRES\n", partitions=PARTITION_24_11, nodes=NODE_24_11
    )
    billing = find_job_billing(job(gpus=4, device="cuda", exclusive=False), None, ask=ask)
    assert billing.tres["mem"] == 4 * 64000  # DefMemPerGPU among JobDefaults
    assert billing.node == pytest.approx(128 + 4 * 50)
    assert "MAX_TRES_GRES" in billing.words


def test_a_shared_node_gives_whole_cores_and_the_gpus_asked_for():
    answer = PARTITION_24_11.replace("EXCLUSIVE", "NO")
    ask = RecordedSlurm(
        get_user_name(), config="SelectTypeParameters = CR_CORE_MEMORY\n", partitions=answer, nodes=NODE_24_11
    )
    billing = find_job_billing(
        job(gpus=1, device="cuda", exclusive=False, cpus_per_task=3, memory="10G"), None, ask=ask
    )
    assert (billing.tres["cpu"], billing.tres["gres/gpu:a100"]) == (4, 1)
    assert billing.node == pytest.approx(4 + 1 + 50)


def test_cores_per_gpu_that_are_no_number_are_an_error():
    answer = PARTITION_24_11.replace("EXCLUSIVE", "NO")
    ask = RecordedSlurm(get_user_name(), partitions=answer, nodes=NODE_24_11)
    value = job(gpus=1, device="cuda", exclusive=False, extra={"cpus-per-gpu": "many"})
    with pytest.raises(SpecError, match="cpus-per-gpu must be a number of cores, got 'many'"):
        find_job_billing(value, None, ask=ask)


def test_the_dearest_of_several_kinds_of_nodes_counts_and_is_reported():
    larger = NODE.replace("bl1", "bl3").replace("CPUEfctv=2", "CPUEfctv=8").replace("cpu=2", "cpu=8")
    ask = RecordedSlurm(get_user_name(), nodes=f"{NODE}\n{larger}")
    billing = find_job_billing(job(partition="half"), None, ask=ask)
    assert billing.node == pytest.approx(8 * 0.3)
    assert "at least 0.600" in billing.words


def test_a_constraint_and_a_type_of_gpu_choose_nodes():
    other = NODE.replace("rack1", "rack2").replace("a100", "h100").replace("cpu=2", "cpu=8")
    ask = RecordedSlurm(get_user_name(), nodes=f"{NODE}\n{other}")
    assert find_job_billing(job(partition="half", constraint="rack2"), None, ask=ask).node == pytest.approx(2.4)
    item = job(partition="half", gpu_type="a100", device="cuda", gpus=2)
    assert find_job_billing(item, None, ask=ask).node == pytest.approx(0.6)
    with pytest.raises(SpecError, match="no node of partition half has the resources that the job requests"):
        find_job_billing(job(partition="half", constraint="rack9"), None, ask=ask)


def test_a_type_of_gpu_is_not_the_beginning_of_another():
    other = NODE.replace("a100", "a10").replace("cpu=2", "cpu=1")
    item = job(partition="half", gpu_type="a10", device="cuda", gpus=2)
    assert find_job_billing(
        item, None, ask=RecordedSlurm(get_user_name(), nodes=f"{NODE}\n{other}")
    ).node == pytest.approx(0.3)


def test_licenses_are_of_the_job_not_of_its_nodes():
    weights = "PartitionName=lic Default=YES OverSubscribe=NO TRESBillingWeights=CPU=1,License/matlab=7"
    ask = RecordedSlurm(get_user_name(), partitions=weights, nodes=NODE.replace("Partitions=main", "Partitions=lic"))
    pricing = billed(job(extra={"licenses": "matlab:2"}), ask)
    assert [compute_hourly_charge(pricing, nodes) for nodes in (1, 4)] == [2 + 14, 8 + 14]


def test_the_factor_of_a_qos_multiplies_the_bill_and_a_factor_of_the_site_is_a_price_in_its_units():
    pricing = billed(job(partition="billed", qos="dear", pricing={"price": 1.5, "currency": "SU"}))
    assert compute_hourly_charge(pricing, 2) == 10 * 2
    assert compute_cost(pricing, hours=1.0, nodes=2, gpus_per_node=1, reserved=0) == 10 * 2 * 1.5
    assert describe_price(pricing).startswith("1.5 SU per billing-hour; ")
    assert "usage factor 2 of QOS dear" in describe_price(pricing)


def test_without_accounting_the_usage_factor_is_one():
    assert (
        find_job_billing(
            job(partition="billed", qos="dear"), None, ask=RecordedSlurm(get_user_name(), without=["sacctmgr"])
        ).usage_factor
        == 1
    )


def test_a_usage_factor_that_is_not_told_is_said_and_not_kept(tmp_path):
    requested, silent = job(partition="billed", qos="dear"), RecordedSlurm(get_user_name(), without=["sacctmgr"])
    billing = find_job_billing(requested, tmp_path, ask=silent)
    assert (billing.usage_factor, billing.qos) == (1, "dear")
    assert "the usage factor of the job's QOS is unknown" in billing.words
    assert (
        find_job_billing(requested, tmp_path, ask=RecordedSlurm(get_user_name())).usage_factor == 2
    )  # asked again, and kept
    assert find_job_billing(requested, tmp_path, ask=silent).usage_factor == 2
    unknown = find_job_billing(job(partition="billed", qos="deer"), None, ask=RecordedSlurm(get_user_name()))
    assert "SLURM's accounting reports no usage factor for QOS deer, so 1 is assumed" in unknown.words
    none = RecordedSlurm(
        get_user_name(), config="AccountingStorageType = accounting_storage/none\n", without=["sacctmgr"]
    )
    assert "usage factor" not in find_job_billing(requested, None, ask=none).words


def test_names_are_read_as_slurm_reads_them():
    assert billed(job(partition="billed", qos="Dear")).slurm_billing.usage_factor == 2


def test_variables_of_sbatch_count_where_the_job_says_nothing(monkeypatch):
    monkeypatch.setenv("SBATCH_QOS", "dear")
    assert billed(job(partition="billed")).slurm_billing.usage_factor == 2
    assert billed(job(partition="billed", qos="normal")).slurm_billing.usage_factor == 1


def test_the_default_qos_of_the_association_counts():
    assert find_job_billing(job(partition="billed"), None, ask=RecordedSlurm(get_user_name())).qos == "normal"


def test_what_it_costs_in_units_and_in_money():
    units = billed(job(partition="billed"))
    assert units.currency == "SU"
    assert compute_cost(units, hours=2.0, nodes=2, gpus_per_node=1, reserved=0) == 20.0
    assert describe_price(units).startswith("SU (billing-hours as SLURM counts them); a node is billed 5")
    money = billed(job(partition="billed", pricing={"price": 0.02, "currency": "EUR"}))
    assert compute_cost(money, hours=2.0, nodes=2, gpus_per_node=1, reserved=0) == pytest.approx(0.4)
    assert describe_price(money).startswith("0.02 EUR per billing-hour")


def test_an_upper_bound_of_node_hours_is_no_lower_than_any_job():
    requested = job(partition="half")
    requested = requested.model_copy(update={"pricing": billed(requested)})
    assert compute_max_cost(requested, 10.0, None).price_at_most >= compute_cost(
        requested.pricing, hours=10 / 4, nodes=4, gpus_per_node=1, reserved=0
    )


def test_an_answer_is_kept_for_a_day_and_goes_on_where_slurm_does_not_answer(tmp_path, monkeypatch):
    requested, first = job(partition="billed"), RecordedSlurm(get_user_name())
    assert find_job_billing(requested, tmp_path, ask=first) == find_job_billing(
        requested, tmp_path, ask=RecordedSlurm(get_user_name(), without=["scontrol"])
    )
    assert [file.parent.name for file in tmp_path.rglob("bill-*.json")] == [CACHE_FOLDER]
    other = job(partition="billed", memory="0")
    with pytest.raises(SpecError, match="SLURM does not report its billing"):
        find_job_billing(other, tmp_path, ask=RecordedSlurm(get_user_name(), without=["scontrol"]))
    import time

    later = time.time() + 2 * MAX_CACHE_AGE_SECONDS
    monkeypatch.setattr(time, "time", lambda: later)
    stale = find_job_billing(requested, tmp_path, ask=RecordedSlurm(get_user_name(), without=["scontrol"]))
    assert stale.node == 5
    assert "SLURM does not answer" in stale.words


def test_a_job_on_this_machine_asks_nobody():
    silent = RecordedSlurm(get_user_name(), without=["scontrol", "sacctmgr"])
    local = spec(pricing={"kind": "billing"})
    with pytest.raises(SpecError, match=r"cluster\.kind is local"):
        billed(local, silent)
    assert not silent.asked


def test_a_record_whose_values_have_words_and_equals_signs():
    record = parse_record(NODE_24_11)
    assert record["CfgTRES"] == "cpu=128,mem=503G,billing=128,gres/gpu=4,gres/gpu:a100=4"
    assert record["AllocTRES"] == ""
    assert record["Partitions"] == "gpu"
    assert CONFIG


def test_kept_bills_are_private_as_the_runs_beside_them(tmp_path):
    (tmp_path / ".site").mkdir(mode=0o755)  # as an older tula made it
    billed(job(), root=tmp_path)
    assert list((tmp_path / ".site").iterdir()) and (tmp_path / ".site").stat().st_mode & 0o077 == 0
