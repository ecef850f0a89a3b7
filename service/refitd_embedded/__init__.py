"""A small, real inference engine for CPUs that speaks SGLang's weight-update HTTP API.

It exists so that everything around an engine (a sidecar, a trainer, a rollout worker) can be run, tested and shown on
a laptop, without a GPU and without SGLang. It is no imitation: it loads Qwen2 and Llama checkpoints, batches requests,
samples, reports log-probabilities, and really reloads weights between two steps of its scheduler.

    python -m refitd_embedded --model-path DIR --port 9000

What it is made of, in the order in which a request meets it:

    server      HTTP, as SGLang speaks it (auth, errors, routes_*)
    engine      the front end: pause gate, reader-writer lock, labels
    scheduler   the loop that owns the weights: commands between steps, one batch a step
    runner      one forward for all running requests (cache, sampling)
    model       the decoder itself, a plain `torch.nn.Module`, usable for training too
    weights     reading and checking checkpoints; `defects` does it as carelessly as the real server

Importing this package imports neither torch nor FastAPI. For a trainer:

    from refitd_embedded.weights import load
    decoder = load(Path("checkpoint"))          # a Decoder with Hugging Face parameter names
    logits = decoder(input_ids)                 # with autograd
"""
