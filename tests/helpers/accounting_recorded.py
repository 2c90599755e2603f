"""Recorded output of SLURM's accounting commands: of 22.05.8 on the test cluster, and in the formats of other versions."""

from tula_cli.errors import SchedulerError

CONFIG = """
AccountingStorageTRES   = cpu,mem,energy,node,billing,fs/disk,vmem,pages,gres/gpu,gres/gpu:a100
DefMemPerCPU            = 500
JobDefaults             = (null)
PriorityFlags           = MAX_TRES
SelectTypeParameters    = CR_CPU_MEMORY
"""
PARTITIONS = """
PartitionName=main AllowGroups=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A DefaultTime=00:10:00 OverSubscribe=NO State=UP TotalCPUs=4 TotalNodes=2 JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=4,mem=8000M,node=2,billing=4,gres/gpu=4,gres/gpu:a100=4
PartitionName=billed AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A DefaultTime=NONE Nodes=bl[1-2] PriorityTier=1 OverSubscribe=NO State=UP TotalCPUs=4 TotalNodes=2 SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=4,mem=8000M,node=2,billing=10,gres/gpu=4,gres/gpu:a100=4 TRESBillingWeights=CPU=1.0,Mem=0.25G,GRES/gpu=2.5
PartitionName=half AllowGroups=ALL Default=NO Nodes=bl[1-2] OverSubscribe=NO State=UP JobDefaults=(null) DefMemPerNode=2000 MaxMemPerNode=UNLIMITED TRES=cpu=4,mem=8000M,node=2,billing=1,gres/gpu=4 TRESBillingWeights=CPU=0.3
"""
NODE = "NodeName=bl1 Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUEfctv=2 CPUTot=2 CPULoad=3.13 AvailableFeatures=rack1 ActiveFeatures=rack1 Gres=gpu:a100:2 NodeAddr=10.77.0.1 Version=22.05.8 OS=Linux 6.18.44 #1 SMP @0  RealMemory=4000 AllocMem=0 ThreadsPerCore=1 Partitions=main,billed,half  BootTime=2026-11-24T21:49:53 CfgTRES=cpu=2,mem=4000M,billing=5,gres/gpu=2,gres/gpu:a100=2 AllocTRES= CapWatts=n/a"
# A node as printed by 24.11: two threads per core, a comment with spaces, memory in GB.
NODE_24_11 = "NodeName=g1 Arch=x86_64 CoresPerSocket=32  CPUAlloc=0 CPUEfctv=128 CPUTot=128 CPULoad=0.02 AvailableFeatures=a100,hbm ActiveFeatures=a100,hbm Gres=gpu:a100:4(S:0-1) NodeAddr=g1 NodeHostName=g1 Version=24.11.1 RealMemory=515072 AllocMem=0 Sockets=2 Boards=1 State=IDLE ThreadsPerCore=2 TmpDisk=0 Weight=1 Owner=N/A Partitions=gpu LastBusyTime=2025-01-01T10:00:00 ResumeAfterTime=None CfgTRES=cpu=128,mem=503G,billing=128,gres/gpu=4,gres/gpu:a100=4 AllocTRES= CurrentWatts=0 AveWatts=0 Comment=moved to = rack 7"
PARTITION_24_11 = "PartitionName=gpu AllowGroups=ALL Default=YES QoS=part_gpu OverSubscribe=EXCLUSIVE State=UP TotalCPUs=128 TotalNodes=1 JobDefaults=DefCpuPerGPU=16,DefMemPerGPU=64000 DefMemPerNode=UNLIMITED TRES=cpu=128,mem=503G,node=1,billing=128,gres/gpu=4 TRESBillingWeights=CPU=1,Mem=0.1G,GRES/gpu:a100=50"
ASSOCIATIONS = {
    "proj": """Current Association Manager state

Association Records

ClusterName=tula Account=proj UserName= Partition= Priority=0 ID=6
    SharesRaw/Norm/Level/Factor=1/1.00/1/0.00
    UsageRaw/Norm/Efctv=1190.90/1.00/1.00
    ParentAccount=big(5) Lft=3 DefAssoc=No
    GrpTRES=cpu=N(0),mem=N(0),billing=N(0)
    GrpTRESMins=cpu=N(8),mem=N(6475),node=N(4),billing=1000(19),gres/gpu=N(8)
    GrpTRESRunMins=cpu=N(0),mem=N(0),billing=N(40)
    MaxJobs= MaxJobsAccrue= MaxSubmitJobs= MaxWallPJ=
ClusterName=tula Account=proj UserName={user}(0) Partition= Priority=0 ID=7
    ParentAccount= Lft=4 DefAssoc=No
    GrpTRESMins=cpu=60(8),mem=N(6475),billing=N(19)
    GrpTRESRunMins=cpu=N(0),billing=N(0)
""",
    "big": """Association Records

ClusterName=tula Account=big UserName= Partition= Priority=0 ID=5
    ParentAccount=root(1) Lft=2 DefAssoc=No
    GrpTRESMins=cpu=500(8),mem=N(6475),billing=100(19)
    GrpTRESRunMins=cpu=N(0),billing=N(40)
""",
}
QOS = """QOS Records

QOS=dear(2)
    UsageRaw=1.800000
    GrpTRES=cpu=N(0),billing=N(0)
    GrpTRESMins=cpu=N(0),mem=N(200),billing=300(2)
    GrpTRESRunMins=cpu=N(0),billing=N(0)
    Account Limits
      proj
        MaxTRESPA=cpu=N(0),mem=N(0)
"""
QOS_NORMAL = "QOS Records\n\nQOS=normal(1)\n    GrpTRESMins=cpu=N(8),billing=N(19)\n    GrpTRESRunMins=cpu=N(0)\n"


class RecordedSlurm:
    """SLURM commands with recorded output; the commands in `without` fail."""

    def __init__(
        self,
        user,
        *,
        without=(),
        config=CONFIG,
        partitions=PARTITIONS,
        nodes=NODE,
        factors="normal|1.000000\ndear|2.000000",
    ):
        self.user, self.without, self.asked = user, without, []
        self.texts = {"config": config, "partition": partitions, "node": nodes, "qos": factors}

    def __call__(self, *command):
        self.asked.append(command)
        line = " ".join(command)
        if any(word in line for word in self.without):
            raise SchedulerError(f"{command[0]}: error: access denied")
        if "assoc_mgr" in line:
            if "flags=qos" in line:
                return {"dear": QOS, "normal": QOS_NORMAL}.get(line.rpartition("qos=")[2], "QOS Records")
            name = line.rpartition("accounts=")[2]
            return ASSOCIATIONS.get(name, "Current Association Manager state").replace("{user}", self.user)
        if "associations" in line:
            return "|dear,normal|\n"
        if "user" in command:
            return "proj\n"
        return next(text for name, text in self.texts.items() if name in command)
