"""Models that can be loaded once: what quantises weights may put something else in their place.

SGLang has quantisation methods that transpose and pack what was loaded, and leave parameters behind that no loader
knows (`process_weights_after_loading`). To load such a model again fails in its midst, and stock SGLang ends with it:
seen of fp8 on a GPU (0.5.12.post1), and of awq and blockwise_int8 on a CPU (0.5.23).
"""

from typing import Any


def loaded_once(model: Any, config: Any) -> str | None:
    """Why no weights can be loaded into a model again; None where they can, as far as can be seen.

    `config` is SGLang's of the model. What a method computes beside the weights (scales, say) never had a loader.
    """
    method = getattr(config, "quantization", None)
    if method is None:
        return None
    for name, module in model.named_modules():
        if getattr(module, "quant_method", None) is None:
            continue
        for own, parameter in module.named_parameters(recurse=False):
            if own.endswith("weight") and getattr(parameter, "weight_loader", None) is None:
                return (
                    f"{name}.{own} is not what SGLang's loader left there: quantisation {method} has put another in "
                    "its place, and into that no weights can be loaded. Serve the model without it"
                )
    return None
