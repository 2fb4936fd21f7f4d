"""A plain torch loop as the trainer of a job: set `spec.trainer.command` to run this file.

The loop is REINFORCE, with advantages relative to the group. What makes it a trainer is the base class, which does all
that is not learning, and the last line: `serve` answers the agent and calls each method when it is due.
"""

from torch.optim import SGD, Optimizer

from colocated_rl_trainer.grpo.batch import Shard
from colocated_rl_trainer.grpo.loss import token_logp
from colocated_rl_trainer.grpo.torch_loop import TorchLoop
from colocated_rl_trainer.protocol.rank_server import serve


class Reinforce(TorchLoop):
    def make_optimizer(self) -> Optimizer:
        return SGD(self.model.parameters(), lr=0.01)

    def learn(self, batch: Shard) -> dict[str, float]:
        for sample in batch.each(self.device):
            logits = self.model(input_ids=sample.tokens[None]).logits[0, :-1]
            logp, _ = token_logp(logits, sample.tokens[1:], temperature=batch.header.temperature)
            loss = -sample.advantage * logp[sample.is_trained[1:]].sum()
            (loss / batch.header.loss_tokens).backward()
        self.update()
        return {"reward": float(batch.reward.mean())}


if __name__ == "__main__":
    serve(Reinforce)
