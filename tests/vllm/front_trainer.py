"""A trainer with vLLM's own HTTP client of its weight transfer, unchanged: URL, then folders with their labels.

Prints a JSON list: of each update "" or the error's text, as the client raises it. Runs where vLLM is installed.
"""

import json
import sys

import requests
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, VLLMWeightSyncClient


def main(url: str, *updates: str) -> None:
    client = HTTPVLLMWeightSyncClient(url)
    assert isinstance(client, VLLMWeightSyncClient)
    client.init_weight_transfer_engine({})
    said = []
    for folder, label in zip(updates[::2], updates[1::2], strict=True):
        try:
            client.start_weight_update()
            client.update_weights({"path": folder})
            client.finish_weight_update(weight_version=label)
        except requests.HTTPError as error:
            said.append(error.response.text)
        else:
            said.append("")
    client.shutdown_weight_transfer_engine()
    print("SAID " + json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
