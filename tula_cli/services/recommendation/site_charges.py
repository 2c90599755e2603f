"""The bill as the site counts it (`pricing.kind: billing`): what is asked of SLURM before a price is told."""

from dataclasses import asdict
from pathlib import Path

from tula_cli.cluster.slurm.billing import Ask, site_bill
from tula_cli.spec.job import JobSpec


def with_site_billing(spec: JobSpec, root: Path | None, *, ask: Ask | None = None) -> JobSpec:
    """Return a job with what SLURM bills it filled in (`pricing.slurm_billing`), on each type of its nodes; others as they are.

    Args:
        spec: the job.
        root: where runs are kept, and answers beside them; None: they are not.
        ask: returns what a command of SLURM prints; None asks it.

    Raises:
        SpecError: SLURM does not tell.
    """
    if not spec.node_types:
        if spec.pricing.kind != "billing":
            return spec
        pricing = spec.pricing.model_copy(update={"slurm_billing": site_bill(spec, root, ask=ask)})
        return spec.model_copy(update={"pricing": pricing})
    types = dict(spec.node_types)
    for name, kind in types.items():
        job_of_type = spec.of_node_type(name)
        if job_of_type.pricing.kind == "billing":
            bill = asdict(site_bill(job_of_type, root, ask=ask))
            types[name] = kind.model_copy(update={"pricing": {**kind.pricing, "slurm_billing": bill}})
    return spec.model_copy(update={"node_types": types})
