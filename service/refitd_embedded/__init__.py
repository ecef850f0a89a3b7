"""A small, real inference engine for CPUs that speaks SGLang's weight-update HTTP API.

Everything around an engine (a sidecar, a trainer, a rollout worker) can be run, tested and shown with it on a laptop,
without a GPU and without SGLang. It loads Qwen2 and Llama checkpoints, batches requests, samples, reports
log-probabilities, and really reloads weights between two steps of its scheduler.

    python -m refitd_embedded --model-path DIR --port 9000

Its modules, in the order in which a request meets them:

    server      the HTTP application, as SGLang has it: bearer tokens, errors; `wire` has bodies, `routes` the routes
    engine      the front end: pause gate, reader-writer lock, labels
    scheduler   the loop that owns the weights: commands between steps, one batch a step; a load is such a command
    runner      requests, how their tokens are drawn, and one forward for all that run
    model       the decoder itself, a plain `torch.nn.Module`, usable for training too
    weights     reading, checking and loading checkpoints, also as carelessly as the real server

Importing this package imports neither torch nor FastAPI. For a trainer:

    from refitd_embedded.weights import load
    decoder = load(Path("checkpoint"))          # a Decoder with Hugging Face parameter names
    logits = decoder(input_ids)                 # with autograd
"""
