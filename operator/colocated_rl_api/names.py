"""Every name that two processes must agree on; each stands here once.

The comment of a constant names its writer and its readers.
"""

from typing import NewType

JobUid = NewType("JobUid", str)
PodUid = NewType("PodUid", str)
PromptPosition = NewType("PromptPosition", int)  # of a prompt of rollout, counted over all passes of the data

GROUP = "rl.colocate.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "ColocatedRLJob"
PLURAL = "colocatedrljobs"
SINGULAR = "colocatedrljob"
SHORT_NAME = "crlj"

# --- Kubernetes objects: written by the operator, read by the operator, kubectl, dashboards
FIELD_MANAGER = "colocated-rl"
OPERATOR = f"{GROUP}/operator"  # spec.managedBy that is ours; reporting controller of events
FINALIZER = f"{GROUP}/finalizer"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "colocated-rl"
JOB_NAME_LABEL = f"{GROUP}/job-name"
JOB_UID_LABEL = f"{GROUP}/job-uid"
ROLE_LABEL = f"{GROUP}/role"
REPLICA_LABEL = f"{GROUP}/replica"  # of its role, from "0"; pods with devices only
SEAT_LABEL = f"{GROUP}/seat"  # "gpu-0", "rollout": the disruption budget knows by it which pods are of the group
SPARE_LABEL = f"{GROUP}/spare"  # "true": a pod of spec.spares
READER_LABEL = f"{GROUP}/reader-of"  # job of a pod that reads its store for people: the command line makes it
PROFILE_LABEL = f"{GROUP}/profile"  # spec.profile, by which the chart's policy judges the pod
DATA_TOKEN_ANNOTATION = f"{GROUP}/data-token"  # of a job, written by people: another value is another data token
KEYS_ANNOTATION = f"{GROUP}/keys"  # of a reference's pod: which authority and data token its keys are of
ATTEMPT_LABEL = f"{GROUP}/attempt"  # how often this replica's pod was made anew, from 0
UNFIT_TAINT = f"{GROUP}/unfit"  # of a node, where the chart allows it; its value is the cause. People remove it
ROLE_GPU = "gpu"  # engine and trainers
ROLE_ENGINE = "engine"  # an engine with devices of its own
ROLE_TRAINER = "trainer"  # trainers beside such engines
GPU_ROLES = (ROLE_GPU, ROLE_TRAINER, ROLE_ENGINE)  # of members, which climb
ROLE_REFERENCE = "reference"  # a reference with devices of its own, which is no member
ROLE_ROLLOUT = "rollout"

# --- containers of a GPU pod
AGENT_CONTAINER = "agent"
GPU_CONTAINER = "gpu"
RUNNER_CONTAINER = "runner"  # copies the runner to where the GPU container finds it

# --- containers of the rollout pod
ROLLOUT_CONTAINER = "rollout"
MODEL_CONTAINER = "model"  # fetches a model of the hub before the others start; of GPU pods too
REWARDS_CONTAINER = "rewards"  # other people's code: makes prompts and computes rewards

CONTAINERS = (
    *(AGENT_CONTAINER, GPU_CONTAINER, RUNNER_CONTAINER),
    *(ROLLOUT_CONTAINER, MODEL_CONTAINER, REWARDS_CONTAINER),
)  # all of the operator's; others are the job's own, or a webhook's

# --- ports of a member. Written by the operator into pods, read by operator, members and people
CONTROL_PORT = 8443  # mutual TLS: the operator's connection (targets down, facts up)
DATA_PORT = 8444  # TLS and the job's data token: gate of an agent, batches of the rollout controller, a reference
METRICS_PORT = 9090  # plain: /metrics, /healthz; of a reference /readyz
PAGES_PORT = 8080  # loopback of the pod: /v1/state and other pages, reached by kubectl port-forward
ENGINE_PORT = 30000  # loopback of the pod: the engine; only the agent talks to it
RENDEZVOUS_PORT = 29500  # first of RENDEZVOUS_PORTS on the pod of replica 0: the trainers' process group
ENGINE_RENDEZVOUS_PORT = 29600  # likewise, on the first pod of an engine over several: the engine's
RENDEZVOUS_PORTS = 100  # lineage n uses RENDEZVOUS_PORT + n % RENDEZVOUS_PORTS, so that two groups never meet

# --- files in member and GPU containers. Mounted by the operator's pods, read by members, runner and trainer
JOB_FILE = "/etc/colocate/job/job.json"  # JobFile of `member_wire`
TRAINER_CONFIG_FILE = "/etc/colocate/job/trainer.json"  # spec.trainer.config as it was written
TLS_DIR = "/etc/colocate/tls"  # the pod's own Secret: the files below; agent, rollout controller, reference only
CA_FILE = "ca.crt"
CERT_FILE = "tls.crt"
KEY_FILE = "tls.key"
DATA_TOKEN_FILE = "data-token"
HELD_KEYS_FILE = "held-keys.json"  # HeldKeys of these files
KEYS_DIR = "/run/colocate/keys"  # what the operator has renewed of them, in memory; agent, rollout controller only
STATE_DIR = "/var/lib/colocate"  # journal of the agent; store of the rollout controller (its volume)
BIN_DIR = "/run/colocate/bin"  # the runner, copied by the init container; read-only in the GPU container
SOCKET_DIR = "/run/colocate/sock"  # runner.sock, trainer-<rank>.sock; shared by agent and GPU container
BATCH_DIR = "/run/colocate/batches"  # shards: the agent writes, trainers read; and a reference's scores beside them
WEIGHTS_DIR = "/weights"  # volume of the exports: in memory, or shared where engines have pods of their own
# trainers write, engines read; the agent makes it, so that it may remove what is old: the volume's root is sticky
EXPORTS_DIR = "/weights/exports"
MODEL_DIR = "/model"  # what spec.model names, read-only
RECORDED_DIR = "/recorded"  # spec.recorded's claim, read-only; rollout controller only
FORMER_DIR = "/former"  # spec.restoreFrom's claim, read-only; trainers and rollout controller
FORMER_SAMPLES_DIR = "/former-samples"  # the claim of its samples, read-only; rollout controller only
PROMPTS_DIR = "/prompts"  # claims of spec.rollout.prompts, each by its name, read-only; task server only
REWARD_TOKENS_DIR = "/etc/colocate/reward-tokens"  # Secrets of reward.http, each by its name; rollout controller only
HUB_TOKEN_FILE = "hub-token"  # entry of the Secret of a private model
DEFAULT_HUB = "https://huggingface.co"
REWARD_TOKEN_FILE = "reward-token"  # not "token", which Kubernetes' own tokens have: its owner means it to be sent
TASKS_DIR = "/run/colocate/tasks"  # tasks.sock; shared by rollout controller and task server
TASKS_SOCKET = "/run/colocate/tasks/tasks.sock"  # the task server listens, the rollout controller connects
CHECKPOINT_DIR = "/checkpoints"  # the checkpoint volume; trainers only
MIRROR_DIR = "/run/colocate/mirrors"  # memory of a job with spec.checkpoint.inMemory; trainers only
SCRATCH_DIR = "/scratch"  # HOME and caches of the GPU container

# --- environment of member processes. Written by the operator, read by the member's settings
ENV_POD_NAME = "POD_NAME"
ENV_POD_UID = "POD_UID"
ENV_POD_IP = "POD_IP"
ENV_POD_NAMESPACE = "POD_NAMESPACE"
ENV_ROLE = "COLOCATE_ROLE"  # one of GPU_ROLES
ENV_REPLICA = "COLOCATE_REPLICA"
ENV_HUB_TOKEN = "HF_TOKEN"  # as huggingface_hub reads it
ENV_GRACE = "COLOCATE_GRACE_S"  # of the pod; read by the runner
ENV_FAULTS = "COLOCATE_FAULTS"  # FAULTS_TAKEN: the agent takes injected faults; else absent
FAULTS_TAKEN = "taken"
ENV_WIPED = "COLOCATE_WIPED"  # directories, with : between, that the runner empties when it starts


def claim_name(job: str, job_uid: JobUid, volume: str) -> str:
    """Return the name of the claim that is made for a volume of a job: `store`, `checkpoints` or `weights`."""
    return f"{job}-{volume}-{job_uid[:8]}"


def member_server_name(job_uid: JobUid) -> str:
    """Return the TLS name of the member that serves clients of the job: its rollout controller."""
    return f"{job_uid}.members.colocate.internal"


def pod_server_name(job_uid: JobUid, pod: str) -> str:
    """Return the TLS name of one member: pod addresses change, so its certificate names job and pod instead."""
    return f"{pod}.{member_server_name(job_uid)}"


OPERATOR_CLIENT_NAME = "operator.colocate.internal"  # common name of the only certificate that may send targets
