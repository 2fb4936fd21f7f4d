"""List every reason that operator and members give, with its meaning and what a person does about it.

`explain` prints from this table, docs/cli.md shows it, and a test compares it with the reasons in the sources. A row
describes the reason in general; the member's own message describes what happened to one job.
"""

from __future__ import annotations

from typing import NamedTuple


class Remedy(NamedTuple):
    """States the meaning of a reason, and what to do about it."""

    means: str
    do: str
    heals: bool = False  # by itself, usually; a person looks when it stays


def of(reason: str) -> Remedy:
    """Return the remedy for a reason, also for one that only a newer version knows."""
    return REMEDIES.get(reason, UNKNOWN)


UNKNOWN = Remedy("this program does not know the reason", "read its message; a newer kubectl crlj may say more")

REMEDIES: dict[str, Remedy] = {
    # --- the operator, of the job
    "NotSeen": Remedy(
        "no operator has looked at this job",
        "see that one runs and watches this namespace: "
        "kubectl get deployment -A -l app.kubernetes.io/name=colocated-rl; its log shows why it does not",
    ),
    "SpecNotSeen": Remedy(
        "the operator has not looked at the newest spec yet", "wait; if it stays, see the operator's log", heals=True
    ),
    "InvalidSpec": Remedy(
        "the spec breaks a rule that the API server could not see, or is in words of a newer operator",
        "put the spec right (kubectl edit) or make a new job; what runs of it stays as it is",
    ),
    "ObjectRefused": Remedy(
        "the API server does not admit an object of the job, or its deletion: quota, pod security, a webhook, a "
        "missing right, a name that is taken; or it fails at it",
        "put right what the message names; the operator tries again every 30 s",
    ),
    "VolumeLost": Remedy(
        "somebody deleted a volume of the job, and nothing is begun anew in its place",
        "put back the claims that the message names, with their data, and the job goes on by itself; or make another "
        "job, which begins with its spec.model",
    ),
    "BackoffLimitExceeded": Remedy(
        "the trainers were started again after failures as often as backoffLimit allows within backoffWindowSteps",
        "find out why they ended (logs of the gpu containers, which are kept until then), then kubectl crlj retry JOB, "
        "or raise backoffLimit: it goes on from its newest checkpoint",
    ),
    "FailurePolicy": Remedy(
        "a rule of spec.failurePolicy ends the job at such a failure, or a trainer reported that it would come again",
        "put right what the message names, while the job is suspended if it is a field, or the rule; then kubectl crlj "
        "retry JOB: it goes on from its newest checkpoint",
    ),
    "BackingOff": Remedy(
        "something failed, and what is done about it waits for the back-off of spec.failurePolicy",
        "nothing, unless it goes on happening; backoffSeconds may be changed",
        heals=True,
    ),
    "PodsReadyDeadlineExceeded": Remedy(
        "not every pod answered within podsReadyDeadlineSeconds: the job gave its devices back and tries again later",
        "see why the pods that the message names do not run: quota, nodes, images, claims",
        heals=True,
    ),
    "PodsStarting": Remedy("pods are missing, starting or silent", "see the pods below", heals=True),
    "Deleted": Remedy(
        "the job is being deleted: members stop, pods go",
        "wait a minute; if it stays, the operator is not running: start it, or remove the finalizer "
        "rl.colocate.dev/finalizer from the job",
    ),
    "DeadlineExceeded": Remedy(
        "the job was not complete within activeDeadlineSeconds",
        "kubectl crlj retry JOB: it goes on from its newest checkpoint, and its time begins anew. "
        "Of a job that runs activeDeadlineSeconds may be raised",
    ),
    "ManagedByAnother": Remedy(
        "spec.managedBy names another controller: the operator leaves the job alone",
        "ask that controller, or make a new job without managedBy",
    ),
    "Suspending": Remedy("spec.suspend is true: members stop, then pods go", "wait", heals=True),
    "Suspended": Remedy("spec.suspend is true: the job has no pods, its volumes are kept", "kubectl crlj resume JOB"),
    "Retried": Remedy("a failed job is asked to go on: its former pods go first", "wait", heals=True),
    # --- the operator, of a climb that begins again
    "Resized": Remedy(
        "the group has another number of replicas than spec.replicas: there is no room for all (spec.elasticPolicy), "
        "or the next step begins with the other number",
        "nothing: it follows by itself at a step boundary, once there is room; see the pods below, and condition "
        "PodsReady. In a queue suspend the job, and resume it",
        heals=True,
    ),
    "PodReplaced": Remedy(
        "a GPU pod was replaced, so the trainers start together again, unless it had engines alone",
        "nothing, unless it goes on happening; it uses up backoffLimit only if the pod failed by itself, or if a rule "
        "shows it",
        heals=True,
    ),
    "TrainerDied": Remedy(
        "a trainer rank ended by itself",
        "see the exception in the message, and the gpu container's log; the job restarts all ranks from the newest "
        "checkpoint, until backoffLimit is used up",
        heals=True,
    ),
    "RungDeadlineExceeded": Remedy(
        "the group stood on one rung for longer than the deadlines of spec.switch allow",
        "see what the slowest pod waits for; raise the deadline while the job is suspended if the work is only slow",
        heals=True,
    ),
    "WeightsDiffer": Remedy(
        "engines took the same version and hold different weights, and no more than half of them the same; or an "
        "engine was not shown to hold its weights, and neither was the next one, on the same export",
        "look at the memory and the devices of the nodes in the message; the trainers start again meanwhile, "
        "backoffLimit times",
        heals=True,
    ),
    "OperatorRestarted": Remedy("another operator took over", "nothing", heals=True),
    # --- pods, in kubelet's words
    "NoPod": Remedy(
        "a seat of the job has no pod", "see the job's events: something does not admit it, or it is made soon"
    ),
    "PodNotRunning": Remedy("a container of the pod does not run", "read the message; kubectl describe pod shows more"),
    "Unschedulable": Remedy(
        "no node has room for the pod",
        "see the message: free devices or add nodes, correct gpus.resourceName or resources, or ask for fewer replicas",
    ),
    "ImageNotPulled": Remedy(
        "the node can't pull an image",
        "correct gpus.image or the chart's images; see the pull secrets of the namespace",
    ),
    "VolumeNotMounted": Remedy(
        "a volume of the pod is not there", "see the claims: kubectl get pvc; the model's claim has to exist beforehand"
    ),
    "OutOfMemory": Remedy(
        "the kernel ended a container for its memory",
        "raise the container's memory limit (gpus.resources, rollout.resources); weights count twice, with the "
        "trainer's host copy",
    ),
    "ContainerCrashes": Remedy(
        "a container ends again and again", "read its last words in the message, and kubectl logs --previous"
    ),
    "Evicted": Remedy(
        "the node ended the pod", "nothing if it is replaced; else see the node's conditions", heals=True
    ),
    "PodTerminating": Remedy(
        "the pod is being deleted",
        "wait; a GPU pod that does not end within its grace and 30 s is forgotten",
        heals=True,
    ),
    "PodStarting": Remedy("the pod's containers are being started", "wait", heals=True),
    "MemberSilent": Remedy(
        "the pod runs and its member has not reported under this epoch",
        "wait 30 s: then the pod is replaced; if all are silent, see that nothing blocks port 8443 between the "
        "operator and this namespace",
        heals=True,
    ),
    "Straggler": Remedy(
        "the other pods of its role waited for this one, and a job goes at the pace of its slowest pod",
        "if it is the same pod in every step, see kubectl crlj timeline JOB for the rung that takes it longer, and "
        "what is wrong with its node; kubectl delete pod POD moves it once the node is cordoned",
        heals=True,
    ),
    # --- an agent
    "RunnerUnreachable": Remedy(
        "the agent does not reach the runner in the GPU container",
        "see whether the gpu container runs: its image may lack python3, or have its own entrypoint's surroundings",
    ),
    "EngineLost": Remedy(
        "the engine ended, or was ended because it could not be trusted any more",
        "the agent starts it again, more slowly each time; the message has its last words (memory, a wrong flag)",
        heals=True,
    ),
    "EngineNotReaped": Remedy(
        "the engine's processes do not end, even when killed", "the device's driver hangs: delete the pod, see the node"
    ),
    "TrainerStalled": Remedy(
        "a step has stood still for far longer than any before: most likely one rank hangs, and all others wait for it",
        "the message says in which function; of several pods with it, the one that is furthest behind is named in the "
        "event when the step is tried again, which happens by itself once no rank gets on",
        heals=True,
    ),
    "TrainerFailed": Remedy(
        "a trainer refused or failed a call, and was stopped",
        "read the message and the gpu container's log; the operator starts all ranks again",
        heals=True,
    ),
    "CheckpointNotWritten": Remedy(
        "the checkpoints' volume takes no checkpoint; rollout goes on, and the next step waits for it",
        "expand the claim, or remove from it what the job does not need; trainers go on by themselves once there is "
        "room, and past spec.switch's deadline the step is tried again",
    ),
    "StateNotMirrored": Remedy(
        "the memory of pods took no copy of the trainers' state; the job goes on, and a death would lead back to the "
        "newest checkpoint",
        "if the message says that no space is left, suspend the job and make spec.checkpoint.inMemory.sizeLimit larger",
        heals=True,
    ),
    "SlowNetwork": Remedy(
        "ranks reach other pods by TCP although the pod has an RDMA device; the job goes on, more slowly than it could",
        "set LimitMEMLOCK=infinity for containerd on the node, if the message says that locked memory is limited, and "
        "delete the pod; else see that the image has NCCL's plugin of the network (docs/clouds.md, Locked memory)",
    ),
    "ModelNotWritten": Remedy(
        "every step is done and saved, and the checkpoints' volume has no room for the model",
        "expand the claim, or remove from it what the job does not need; the model is left once there is room",
    ),
    "TrainerNotStarted": Remedy(
        "a trainer's process can't be started", "correct spec.trainer.command: it has to be in the gpu image"
    ),
    "TrainerNotReaped": Remedy(
        "a trainer's processes do not end, even when killed", "the device's driver hangs: delete the pod, see the node"
    ),
    "TrainerAhead": Remedy(
        "the trainers stand at a later step than the job wants",
        "the job's record is older than its checkpoints, as when a cluster was restored from a backup: make a new job, "
        "which begins with its spec.model",
    ),
    "TargetIncomplete": Remedy("the rollout pod has no address yet", "see the rollout pod", heals=True),
    "BatchUnavailable": Remedy(
        "the agent can't fetch its part of the batch from the rollout controller",
        "see the rollout pod, and that nothing blocks port 8444 within the job",
        heals=True,
    ),
    "ExportTorn": Remedy(
        "weights on the volume that GPU pods share do not match their manifest, or are not seen there",
        "see that the storage class gives one volume to pods on several nodes (ReadWriteMany), and shows each what "
        "others wrote",
        heals=True,
    ),
    "ExportsNotRemoved": Remedy(
        "weights of older steps can't be removed, and there is no room for the next",
        "what the trainer writes has to be writable for the pod's group: see the umask of its code",
    ),
    "ExportsNotListed": Remedy(
        "the agent can't see which weights are on the volume, and the trainer waits for that with its next ones",
        "see the message: the volume has to be there, and readable for the pod's group",
        heals=True,
    ),
    "VolumeSilent": Remedy(
        "the volume with the weights does not answer; gates stay as they are, and nobody takes new weights",
        "see the storage's server and the node's way to it; a pod that stays so is better deleted",
        heals=True,
    ),
    "ReferenceFailed": Remedy(
        "the reference beside the engines ended by itself, or can't be started; engines go on, and samples are scored "
        "in other pods, or wait for this one's, which is started again",
        "see the gpu container's log, lines of [reference]: out of device memory, lower --mem-fraction-static in "
        "rollout.engine.args or microBatchTokens in trainer.config",
        heals=True,
    ),
    # --- the rollout controller
    "PromptsUnusable": Remedy(
        "no prompt of the source can be used",
        "correct the prompts' source or the limits that the message names; make a new job",
    ),
    "BatchNotDealt": Remedy(
        "a sealed batch can't be dealt out to the present number of trainer ranks; it is unchanged",
        "make room on the store's volume or restore it, as the message states; or set replicas back",
    ),
    "RecordingUnusable": Remedy(
        "a TrainOnly job finds no whole batch of its next step in the recording; it looks again",
        "lower spec.steps to what is recorded, or let it be recorded; look at spec.recorded",
    ),
    "PromptsNotMade": Remedy("the task could not make its prompts; it is asked again", "read the message", heals=True),
    "HeldOutPromptsNotMade": Remedy(
        "the prompts of the evaluation could not be made; they are asked for again", "read the message", heals=True
    ),
    "EvaluationImpossible": Remedy(
        "a set can't be evaluated; steps go on when evaluation.deadlineSeconds is over",
        "take the set out of spec.evaluation.sets, also while the job runs; add one with another source while it is "
        "suspended",
    ),
    "NoLearningSignal": Remedy(
        "filters kept maxFilteredPerBatch groups from one batch: most groups are rewarded all alike, or a function of "
        "rollout.filterFunctions drops too many",
        "choose easier or harder prompts, a reward with more levels, a larger groupSize, or a function that drops less",
    ),
    "FilterFailed": Remedy(
        "a function of rollout.filterFunctions gave no verdict on a group, which was given up for it: it raised an "
        "error, returned no bool, took too long, or its process died",
        "the message names which of these; make the function take every group, also one of sessions, which has no row",
        heals=True,
    ),
    "StoreFull": Remedy(
        "the store's volume is full: nothing new is accepted",
        "enlarge its claim, JOB-store- and part of the job's UID; the controller goes on then",
    ),
    "TaskProcessLost": Remedy(
        "the process that runs task and reward ended; it is started again",
        "see the reward function if it goes on",
        heals=True,
    ),
    "VerifierFailed": Remedy(
        "the reward function failed on the answers of a group, which was given up for it",
        "the message names where it was raised; make the function take every answer",
        heals=True,
    ),
    "RewardTimedOut": Remedy(
        "the reward function took too long on the answers of a group, which was given up for it",
        "make the function faster, bound what it tries, or give it longer (rollout.prompts.rewardDeadlineSeconds)",
        heals=True,
    ),
    "ReplyGarbled": Remedy(
        "the reward function's process gave an answer that nobody can read, on a group which was given up for it",
        "see that the function writes nothing to the pipe that it was started with",
        heals=True,
    ),
    "RewardProcessDied": Remedy(
        "the reward function's process died on the answers of a group, which was given up for it",
        "see rollout.prompts.resources and the function",
        heals=True,
    ),
    "PlayerLost": Remedy(
        "the process that plays episodes ended, or did not end one when asked to; it is started again",
        "if it goes on, see container rewards: its log, and whether rollout.prompts.resources leave it memory",
        heals=True,
    ),
    "EpisodeFailed": Remedy(
        "episodes of the environment failed until their group was given up",
        "the message names where; play the environment alone with vf-eval over the job's gateway",
        heals=True,
    ),
    "EpisodeHung": Remedy(
        "episodes of the environment did nothing until their group was given up",
        "see what their tools and rewards wait for, or raise deadlineSeconds of the environment",
        heals=True,
    ),
    "EpisodeWithoutTurn": Remedy(
        "episodes of the environment ended without asking the job's model, and their group was given up",
        "leave client and model of its agent out of config: the job gives them",
        heals=True,
    ),
    "ReferenceUnavailable": Remedy(
        "no pod of the reference scores what is finished: it waits, and rollout goes on until maxStaleness stops it",
        "nothing while a pod starts, and loads its model; else see the pods of role reference (kubectl get pods -l "
        "rl.colocate.dev/role=reference), with placement WithRollout those of role engine, and the log of the newest",
        heals=True,
    ),
    "RewardUnavailable": Remedy(
        "the endpoint of reward.http gives no reward: samples wait, and rollout goes on until maxStaleness stops it; a "
        "sample that gets none in `attempts` while others do is replaced",
        "see the endpoint, its address and token, and whether the rollout pod may reach it",
        heals=True,
    ),
    "RewardRefused": Remedy(
        "the endpoint of reward.http refused samples of a group with 400, 413 or 422, which was given up for it",
        "read the message and the endpoint's log: it wants another request than it gets",
        heals=True,
    ),
    "RewardGarbled": Remedy(
        "the endpoint of reward.http answered something else than a reward, on a group which was given up for it",
        'let it answer {"reward": NUMBER}',
        heals=True,
    ),
    "RewardNotAsked": Remedy(
        "rows of a group can't be sent to the endpoint of reward.http, and it was given up for it",
        "read the message: a row is too large, or has numbers that JSON has no word for",
        heals=True,
    ),
    "EngineRejected": Remedy(
        "engines refuse the requests of a group, which was given up for it",
        "read the message: most often the prompt and maxResponseTokens are longer than the engine's context",
        heals=True,
    ),
    "NoProgress": Remedy(
        "attempt after attempt at a sample brought no token, and its group was given up",
        "read how the last attempt ended; then see the engines: logs of the gpu containers",
        heals=True,
    ),
    "TooManyAttempts": Remedy(
        "a sample was interrupted so often that its group was given up",
        "let a response end sooner (maxResponseTokens) or a step take longer (batchSize)",
        heals=True,
    ),
    "TooManyTokensResent": Remedy(
        "a long response was interrupted again and again after a few tokens, and its group was given up",
        "let a step take longer (batchSize, minRolloutSeconds) or a response end sooner (maxResponseTokens)",
        heals=True,
    ),
    "TooStale": Remedy(
        "samples of a group were too old too often, and it was given up",
        "raise maxStaleness, lower maxConcurrency or maxResponseTokens, or choose another atMaxStaleness",
        heals=True,
    ),
    # --- what this program finds out by itself
    "NothingGenerated": Remedy(
        "the engines' gates are open, no sample runs at them, and no response ended in 30 s",
        "see the rollout pod's log and problem; engine logs are in the gpu containers",
    ),
    "NoGateOpen": Remedy("the rollout controller sees no open gate", "see the GPU pods above", heals=True),
}
