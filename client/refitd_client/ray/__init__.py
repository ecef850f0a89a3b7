"""Followers in a Ray job: on each node with engines an actor that has a `refitd serve --follow` as its process.

>>> from refitd_client.ray import start_followers
>>> engines = {node_id: ["http://127.0.0.1:30000"] for node_id in nodes_with_engines}
>>> followers = start_followers("http://10.0.0.1:8700", engines, base_model="/models/qwen3-8b")
>>> followers.urls
{'1c0f…': 'http://127.0.0.1:8700', '9be2…': 'http://127.0.0.1:8700'}

Each node needs refitd with the extra `ray` (`pip install '.[ray]'`), which brings the service.
"""

from refitd_client.ray.followers import RayFollower, RayFollowers, start_followers

__all__ = ["RayFollower", "RayFollowers", "start_followers"]
