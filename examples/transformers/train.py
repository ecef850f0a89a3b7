"""A training by transformers' Trainer that engines follow, step by step.

python examples/transformers/train.py ROOT RUN SERVICE_URL MODEL
"""

import sys

from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from refitd_client.trainers.transformers import RefitCallback

root, run, service, model = sys.argv[1:5]
out = sys.argv[5] if len(sys.argv) > 5 else "build/trained"

rows = [{"input_ids": [16, number, number + 1], "labels": [16, number, number + 1]} for number in range(15)]
settings = TrainingArguments(
    output_dir=out,
    max_steps=3,
    learning_rate=1e-2,
    per_device_train_batch_size=4,
    use_cpu=True,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
)
trainer = Trainer(model=AutoModelForCausalLM.from_pretrained(model), args=settings, train_dataset=rows)
trainer.add_callback(RefitCallback(root, run, service, wait=60, errors="raise"))
trainer.train()
print("trained", trainer.state.global_step)
