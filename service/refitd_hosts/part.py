"""What ring 3 registers."""

from refitd.parts import CommandLine, Part

PART = Part(
    commands={
        "collect": CommandLine("Change", "refitd_hosts.collect", "Delete what nothing needs from an object store.")
    },
    settings=(
        "refitd_hosts.follow.options:FollowSettings",
        "refitd_hosts.options:PushSettings",
        "refitd_hosts.options:GroupSettings",
    ),
    routes=("refitd_hosts.hub.routes:files_routes", "refitd_hosts.hub.routes:router"),
    compose="refitd_hosts.composing:compose",
    words="refitd_hosts.hub.words:Words",
    group="refitd_hosts.composing:find_group",
)
