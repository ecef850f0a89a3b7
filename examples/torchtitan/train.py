"""A tiny Llama of torchtitan's that engines follow.

    python examples/torchtitan/train.py --make-model MODEL                    what the engine and the service begin with
    torchrun --nproc-per-node 2 examples/torchtitan/train.py ROOT RUN SERVICE_URL

torchtitan's Trainer and its attention want an accelerator, so this plays the Trainer's part on a CPU, without a forward
pass: model, adapter and checkpointer are torchtitan's own, and `save` is called after each step, as the Trainer does.
"""

import sys

import torch
from refit_checkpoints import RefitCheckpoints
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torchtitan.models.llama3 import model_registry
from transformers import LlamaConfig, LlamaForCausalLM

if sys.argv[1] == "--make-model":
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 16}
    LlamaForCausalLM(LlamaConfig(vocab_size=2048, **sizes)).save_pretrained(sys.argv[2])
    sys.exit()

root, run, service = sys.argv[1:4]
out = sys.argv[4] if len(sys.argv) > 4 else "build/torchtitan"
distributed.init_process_group("gloo")
spec = model_registry("debugmodel")
model = spec.model.build()
model.init_states()
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
checkpointer = RefitCheckpoints.Config(enable=True, root=root, run=run, service_url=service, wait=60).build(
    dataloader=None,
    model_parts=[model],
    optimizers=None,
    lr_schedulers=None,
    states={},
    sd_adapter=spec.state_dict_adapter(spec.model, None),
    base_folder=out,
)
for step in (1, 2):
    sum(parameter.square().sum() for parameter in model.parameters()).backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpointer.save(step)
checkpointer.close()
if distributed.get_rank() == 0:
    print("trained", step)
distributed.destroy_process_group()
