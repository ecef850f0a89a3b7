"""What the shipped configurations of Envoy and nginx send past the front is what the front itself would pass on."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml
from starlette.routing import Route

from refitd_front.front import PASSED
from support.front_app import front_of

DEPLOY = Path(__file__).parents[3] / "deploy"
NGINX = (DEPLOY / "nginx/front.conf").read_text()


def envoys() -> Mapping[str, str]:
    """The method of each path that Envoy sends to the engines."""
    (listener,) = yaml.safe_load((DEPLOY / "envoy/front.yaml").read_text())["static_resources"]["listeners"]
    connections = listener["filter_chains"][0]["filters"][0]["typed_config"]
    (host,) = connections["route_config"]["virtual_hosts"]
    *past, rest = host["routes"]
    assert rest == {"match": {"prefix": "/"}, "route": {"cluster": "front", "timeout": "0s"}}
    found: dict[str, str] = {}
    for each in past:
        (method,) = each["match"]["headers"]
        assert method.keys() == {"name", "string_match"}
        assert (method["name"], each["route"]["cluster"]) == (":method", "engines")
        assert each["match"].keys() == {"path", "headers"}
        found[each["match"]["path"]] = method["string_match"]["exact"]
    assert len(found) == len(past)
    return found


def nginxs() -> Mapping[str, str]:
    """The same of nginx."""
    block = re.search(r'map "\$request_method \$request_uri" \$goes_to \{\n(.*?)\n    \}', NGINX, re.DOTALL)
    assert block is not None
    default, *past = block[1].splitlines()
    assert default.strip() == "default front;"
    lines = [re.fullmatch(r' +"~\^([A-Z]+) (/[\w/]+)\(\\\?\|\$\)" engines;', line) for line in past]
    found = {line[2]: line[1] for line in lines if line is not None}
    assert len(found) == len(past)
    return found


@pytest.mark.parametrize("sent", [envoys, nginxs])
def test_requests_for_answers_go_past_the_front_and_no_route_that_it_answers_or_refuses(
    tmp_path: Path, sent: Callable[[], Mapping[str, str]]
) -> None:
    front, versions, _ = front_of("http://127.0.0.1:9", tmp_path)
    routes = [each for each in front.app().routes if isinstance(each, Route)]
    assert sent() == PASSED
    own = {each.path for each in routes if getattr(each.endpoint, "__name__", "") != "_through"}
    assert {"/update_weights_from_disk", "/finish_weight_update", "/sleep", "/abort_request", "/pause"} <= own
    assert not own & sent().keys()
    versions.close()


def test_no_other_place_of_nginxs_configuration_names_the_engines() -> None:
    assert re.findall(r"(?:proxy_pass|location|rewrite|return|try_files).*", NGINX) == [
        "location / {",
        "proxy_pass http://$goes_to; # the target as it was sent",
    ]
