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
        "check that an operator runs and watches this namespace: kubectl get deployment -A -l "
        "app.kubernetes.io/name=colocated-rl; its log says why it does not",
    ),
    "SpecNotSeen": Remedy(
        "the operator has not looked at the newest spec yet", "wait; if it stays, see the operator's log", heals=True
    ),
    "InvalidSpec": Remedy(
        "the spec breaks a rule that the API server could not check, or uses fields of a newer operator",
        "correct the spec (kubectl edit) or create a new job; pods that already run are left alone",
    ),
    "ObjectRefused": Remedy(
        "the API server rejects an object of the job or its deletion (quota, pod security, a webhook, a missing "
        "right, a name that is taken), or fails to process it",
        "fix what the message names; the operator retries every 30 s",
    ),
    "VolumeLost": Remedy(
        "somebody deleted a volume of the job, and the operator does not start over on an empty one",
        "restore the claims that the message names, with their data, and the job continues by itself; or create "
        "another job, which starts from its spec.model",
    ),
    "BackoffLimitExceeded": Remedy(
        "trainers were restarted after failures as often as backoffLimit allows within backoffWindowSteps",
        "find out why they failed (logs of the gpu containers, which are kept until the retry), then run kubectl crlj "
        "retry JOB or raise backoffLimit: the job continues from its newest checkpoint",
    ),
    "FailurePolicy": Remedy(
        "a rule of spec.failurePolicy fails the job for this cause, or a trainer reported that the failure would recur",
        "fix what the message names (suspend the job first if it is a field) or change the rule, then run kubectl "
        "crlj retry JOB: it continues from its newest checkpoint",
    ),
    "BackingOff": Remedy(
        "something failed, and the operator waits for the back-off of spec.failurePolicy before it acts",
        "nothing, unless it keeps happening; backoffSeconds may be changed",
        heals=True,
    ),
    "PodsReadyDeadlineExceeded": Remedy(
        "not every pod answered within podsReadyDeadlineSeconds: the job gave its devices back and tries again later",
        "find out why the pods that the message names do not run: quota, nodes, images, claims",
        heals=True,
    ),
    "PodsStarting": Remedy("pods are missing, starting or silent", "see the pods below", heals=True),
    "OperatorCutOff": Remedy(
        "every pod is ready, but the operator reaches none of them: what runs continues, and the next switch waits",
        "check that nothing blocks port 8443 between the operator and this namespace; if the operator's log has "
        "`authority made`, give the job new keys (docs/runbooks/ca-rotation.md, A job's keys again)",
    ),
    "Deleted": Remedy(
        "the job is being deleted: members stop, then pods are deleted",
        "wait a minute; if it stays, the operator is not running: start it, or remove the finalizer "
        "rl.colocate.dev/finalizer from the job",
    ),
    "DeadlineExceeded": Remedy(
        "the job was not complete within activeDeadlineSeconds",
        "run kubectl crlj retry JOB: it continues from its newest checkpoint, and its time starts again. While a job "
        "runs, activeDeadlineSeconds may be raised",
    ),
    "ManagedByAnother": Remedy(
        "spec.managedBy names another controller: the operator leaves the job alone",
        "look at that controller, or create a new job without managedBy",
    ),
    "Suspending": Remedy("spec.suspend is true: members stop, then pods are deleted", "wait", heals=True),
    "Suspended": Remedy(
        "spec.suspend is true: the job has no pods, and keeps its volumes", "run kubectl crlj resume JOB"
    ),
    "Retried": Remedy("a failed job was asked to continue: its old pods are deleted first", "wait", heals=True),
    # --- the operator, of a climb that begins again
    "Resized": Remedy(
        "the group has another number of replicas than spec.replicas: there is no room for all of them "
        "(spec.elasticPolicy), or the new number applies from the next step on",
        "nothing: the number changes by itself at a step boundary once there is room; see the pods below, and "
        "condition PodsReady. In a queue, suspend and resume the job",
        heals=True,
    ),
    "PodReplaced": Remedy(
        "a GPU pod was replaced; unless it held only engines, all trainers restart together",
        "nothing, unless it keeps happening; it counts only if the pod failed by itself or a rule says so",
        heals=True,
    ),
    "TrainerDied": Remedy(
        "a trainer rank exited",
        "see the exception in the message, and the gpu container's log; all ranks restart, up to backoffLimit times",
        heals=True,
    ),
    "RungDeadlineExceeded": Remedy(
        "the group stood on one rung for longer than spec.switch allows",
        "see what the slowest pod waits for; if the work is only slow, suspend the job and raise the deadline",
        heals=True,
    ),
    "WeightsDiffer": Remedy(
        "engines of one version hold different weights; or two engines in a row failed the check of the same export",
        "check memory and devices of the nodes in the message; trainers restart until backoffLimit is used up",
        heals=True,
    ),
    "OperatorRestarted": Remedy("another operator took over", "nothing", heals=True),
    # --- pods, in kubelet's words
    "NoPod": Remedy(
        "a seat of the job has no pod", "see the job's events: the pod was rejected, or is about to be created"
    ),
    "PodNotRunning": Remedy("a container of the pod does not run", "read the message; kubectl describe pod shows more"),
    "Unschedulable": Remedy(
        "no node has room for the pod",
        "see the message: free devices or add nodes, correct gpus.resourceName or resources, or request fewer replicas",
    ),
    "SchedulingGated": Remedy(
        "a scheduling gate holds the pod back, as that of a queue does until it admits the job",
        "nothing while the queue is full; the workload of the pod group names the missing quota: kubectl get workloads",
        heals=True,
    ),
    "ImageNotPulled": Remedy(
        "the node can't pull an image",
        "correct gpus.image or the chart's images, and check the pull secrets of the namespace",
    ),
    "VolumeNotMounted": Remedy(
        "a volume of the pod can't be mounted",
        "check the claims: kubectl get pvc; the model's claim must exist before the job",
    ),
    "OutOfMemory": Remedy(
        "the kernel killed a container for its memory",
        "raise the container's memory limit (gpus.resources, rollout.resources); weights count twice, because the "
        "trainer keeps a copy in host memory",
    ),
    "ContainerCrashes": Remedy(
        "a container crashes again and again", "read its last output in the message, and kubectl logs --previous"
    ),
    "Evicted": Remedy(
        "the node evicted the pod", "nothing if it is replaced; otherwise see the node's conditions", heals=True
    ),
    "PodTerminating": Remedy(
        "the pod is being deleted",
        "wait; a GPU pod that has not ended 30 s after its grace period is force-deleted",
        heals=True,
    ),
    "PodStarting": Remedy("the pod's containers are being started", "wait", heals=True),
    "MemberSilent": Remedy(
        "the pod runs, but its member has not reported in this epoch",
        "wait 30 s, after which the pod is replaced; if all members are silent, check that nothing blocks port 8443 "
        "between the operator and this namespace",
        heals=True,
    ),
    "Straggler": Remedy(
        "the other pods of its role waited for this one: a job is as fast as its slowest pod",
        "if it is the same pod in every step, find the slow rung with kubectl crlj timeline JOB and check the pod's "
        "node; once the node is cordoned, kubectl delete pod POD moves the pod",
        heals=True,
    ),
    # --- an agent
    "RunnerUnreachable": Remedy(
        "the agent does not reach the runner in the GPU container",
        "check that the gpu container runs: its image may lack python3, or need its own entrypoint",
    ),
    "EngineLost": Remedy(
        "the engine exited, or was killed because its state could no longer be trusted",
        "the agent restarts it, with a growing back-off; the message has its last output (out of memory, a wrong flag)",
        heals=True,
    ),
    "EngineNotReaped": Remedy(
        "the engine's processes do not end, even when killed",
        "the device's driver hangs: delete the pod and check the node",
    ),
    "TrainerStalled": Remedy(
        "a step has made no progress for far longer than ever before: most likely one rank hangs",
        "the message names the function it is in; the step is retried by itself once no rank makes progress, and the "
        "event then names the pod that is furthest behind",
        heals=True,
    ),
    "TrainerFailed": Remedy(
        "a trainer rejected or failed a call, and was stopped",
        "read the message and the gpu container's log; the operator restarts all ranks",
        heals=True,
    ),
    "CheckpointNotWritten": Remedy(
        "no checkpoint can be written to the checkpoints' volume; rollout continues, and the next step waits",
        "expand the claim, or delete from it what the job does not need; the trainers continue by themselves once "
        "there is room, and past the deadline in spec.switch the step is retried",
    ),
    "StateNotMirrored": Remedy(
        "no copy of the trainers' state was stored in the memory of pods; the job continues, and after a failure it "
        "restarts from the newest checkpoint",
        "if the message says that no space is left, suspend the job and raise spec.checkpoint.inMemory.sizeLimit",
        heals=True,
    ),
    "SlowNetwork": Remedy(
        "ranks reach other pods over TCP although the pod has an RDMA device; the job continues, but slower",
        "if the message says that locked memory is limited, set LimitMEMLOCK=infinity for containerd on the node and "
        "delete the pod; otherwise check that the image has NCCL's plugin for the network (docs/clouds.md, Locked "
        "memory)",
    ),
    "ModelNotWritten": Remedy(
        "every step is done and saved, and the checkpoints' volume has no room for the model",
        "expand the claim, or delete from it what the job does not need; the model is saved once there is room",
    ),
    "TrainerNotStarted": Remedy(
        "a trainer's process can't be started", "correct spec.trainer.command: it must exist in the gpu image"
    ),
    "TrainerNotReaped": Remedy(
        "a trainer's processes do not end, even when killed",
        "the device's driver hangs: delete the pod and check the node",
    ),
    "TrainerAhead": Remedy(
        "the trainers are at a later step than the job's status",
        "the status is older than the checkpoints, as after a restored cluster: create a new job",
    ),
    "TargetIncomplete": Remedy("the rollout pod has no address yet", "check the rollout pod", heals=True),
    "BatchUnavailable": Remedy(
        "the agent can't fetch its part of the batch from the rollout controller",
        "check the rollout pod, and that nothing blocks port 8444 within the job",
        heals=True,
    ),
    "ExportTorn": Remedy(
        "weights on the volume that GPU pods share do not match their manifest, or are not visible there",
        "check that the storage class supports ReadWriteMany, and shows each pod what others wrote",
        heals=True,
    ),
    "ExportsNotRemoved": Remedy(
        "weights of older steps can't be removed, and there is no room for the next ones",
        "files of the trainer must be writable for the pod's group: check the umask of its code",
    ),
    "ExportsNotListed": Remedy(
        "the agent can't list the weights on the volume, and the trainer waits for that before it writes the next ones",
        "see the message: the volume must be mounted, and readable for the pod's group",
        heals=True,
    ),
    "VolumeSilent": Remedy(
        "the volume with the weights does not answer; gates stay as they are, and no engine takes new weights",
        "check the storage server and the node's connection to it; delete a pod for which it never answers again",
        heals=True,
    ),
    "ReferenceFailed": Remedy(
        "the reference beside the engines exited or can't be started; it is restarted, engines and trainers "
        "continue, and samples are scored in other pods or wait",
        "see the gpu container's log, lines of [reference]; if it ran out of device memory, lower "
        "--mem-fraction-static in rollout.engine.args or microBatchTokens in trainer.config",
        heals=True,
    ),
    # --- the rollout controller
    "PromptsUnusable": Remedy(
        "no prompt of the source can be used",
        "create a new job with another source, or with other limits, as the message says",
    ),
    "BatchNotDealt": Remedy(
        "a sealed batch can't be divided among the present number of trainer ranks; the batch is unchanged",
        "make room on the store's volume or restore it, as the message says; or set replicas back",
    ),
    "RecordingUnusable": Remedy(
        "a TrainOnly job finds no complete batch of its next step in the recording; it keeps looking",
        "lower spec.steps to the number of recorded batches, or record the missing ones; check spec.recorded",
    ),
    "PromptsNotMade": Remedy("the task failed to generate its prompts; it is retried", "read the message", heals=True),
    "HeldOutPromptsNotMade": Remedy(
        "the prompts of the evaluation could not be generated; this is retried", "read the message", heals=True
    ),
    "EvaluationImpossible": Remedy(
        "a set can't be evaluated; steps continue after evaluation.deadlineSeconds",
        "remove the set from spec.evaluation.sets; to add one with another source, suspend the job",
    ),
    "NoLearningSignal": Remedy(
        "filters dropped maxFilteredPerBatch groups for one batch: all samples of most groups get the same reward, or "
        "a function of rollout.filterFunctions drops too many groups",
        "create a new job with easier or harder prompts, a reward with more levels, a larger groupSize, or a function "
        "that drops less",
    ),
    "FilterFailed": Remedy(
        "a function of rollout.filterFunctions gave no verdict on a group, which was dropped: it raised an error, "
        "returned no bool, took too long, or its process died",
        "the message says which; the function must accept every group, also one of sessions, which has no row",
        heals=True,
    ),
    "StoreFull": Remedy(
        "the store's volume is full: nothing new is accepted",
        "expand its claim (JOB-store- and a part of the job's UID); the controller then continues",
    ),
    "TaskProcessLost": Remedy(
        "the process that runs task and reward exited; it is restarted",
        "check the reward function if it keeps happening",
        heals=True,
    ),
    "VerifierFailed": Remedy(
        "the reward function failed on the responses of a group, which was dropped",
        "the message says where the error was raised; the function must accept every response",
        heals=True,
    ),
    "RewardTimedOut": Remedy(
        "the reward function took too long on the responses of a group, which was dropped",
        "make the function faster, limit what it tries, or allow more time in a new job "
        "(rollout.prompts.rewardDeadlineSeconds)",
        heals=True,
    ),
    "ReplyGarbled": Remedy(
        "the reward function's process sent an unreadable reply on a group, which was dropped",
        "the function must not write to the pipe that its process was started with",
        heals=True,
    ),
    "RewardProcessDied": Remedy(
        "the reward function's process died on the responses of a group, which was dropped",
        "check the function; more memory (rollout.prompts.resources) needs a new job",
        heals=True,
    ),
    "PlayerLost": Remedy(
        "the process that plays episodes exited, or did not end an episode when asked to; it is restarted",
        "if it keeps happening, see the log of container rewards; more memory (rollout.prompts.resources) needs a new "
        "job",
        heals=True,
    ),
    "EpisodeFailed": Remedy(
        "episodes of the environment failed until their group was dropped",
        "the message says where; run the environment alone with vf-eval through the job's gateway",
        heals=True,
    ),
    "EpisodeHung": Remedy(
        "episodes of the environment did nothing until their group was dropped",
        "see what their tools and rewards wait for, or raise deadlineSeconds of the environment in a new job",
        heals=True,
    ),
    "EpisodeWithoutTurn": Remedy(
        "episodes of the environment ended without a request to the job's model, and their group was dropped",
        "leave client and model of its agent out of config: the job sets them",
        heals=True,
    ),
    "ReferenceUnavailable": Remedy(
        "no pod of the reference scores finished samples: they wait, and rollout continues until maxStaleness stops it",
        "nothing while a pod starts and loads its model; otherwise check the pods of role reference (kubectl get pods "
        "-l rl.colocate.dev/role=reference), with placement WithRollout those with engines (role engine, or gpu where "
        "trainers share their devices), and the log of the newest one",
        heals=True,
    ),
    "RewardUnavailable": Remedy(
        "the endpoint of reward.http gives no reward: samples wait, and rollout continues until maxStaleness stops "
        "it; a sample that gets none in `attempts` while others do is replaced",
        "check the endpoint, its address and token, and whether the rollout pod can reach it",
        heals=True,
    ),
    "RewardRefused": Remedy(
        "the endpoint of reward.http rejected samples of a group with 400, 413 or 422, and the group was dropped",
        "read the message and the endpoint's log: the endpoint expects another form of request",
        heals=True,
    ),
    "RewardGarbled": Remedy(
        "the endpoint of reward.http answered with something that is no reward, and the group was dropped",
        'make it answer {"reward": NUMBER}',
        heals=True,
    ),
    "RewardNotAsked": Remedy(
        "rows of a group can't be sent to the endpoint of reward.http, and the group was dropped",
        "read the message: a row is too large, or has numbers that JSON can't represent",
        heals=True,
    ),
    "EngineRejected": Remedy(
        "engines reject the requests of a group, which was dropped",
        "read the message: most often prompt and maxResponseTokens together exceed the engine's context length, and "
        "a new job needs a lower limit",
        heals=True,
    ),
    "NoProgress": Remedy(
        "many attempts at a sample in a row brought no token, and its group was dropped",
        "read how the last attempt ended, then check the engines: logs of the gpu containers",
        heals=True,
    ),
    "TooManyAttempts": Remedy(
        "a sample was interrupted so often that its group was dropped",
        "make responses shorter (maxResponseTokens) or steps longer (batchSize) in a new job",
        heals=True,
    ),
    "TooManyTokensResent": Remedy(
        "a long response was interrupted again and again after a few tokens, and its group was dropped",
        "make steps longer (batchSize, minRolloutSeconds) or responses shorter (maxResponseTokens) in a new job",
        heals=True,
    ),
    "TooStale": Remedy(
        "samples of a group were too old too often, and the group was dropped",
        "lower maxConcurrency, which may change while the job runs; or in a new job raise maxStaleness, lower "
        "maxResponseTokens or choose another atMaxStaleness",
        heals=True,
    ),
    # --- what this program finds out by itself
    "NothingGenerated": Remedy(
        "the engines' gates are open, but no sample runs and no response ended in 30 s",
        "check the rollout pod's log and problem; engine logs are in the gpu containers",
    ),
    "NoGateOpen": Remedy("the rollout controller sees no open gate", "see the GPU pods above", heals=True),
}
