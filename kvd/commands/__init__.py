"""Commands for operators: one module each, with `main(argv) -> int`."""

# Imported only when called: serving needs none of them, and none needs the server.
COMMANDS = {
    "check-gpu-direct": "kvd.commands.check_gpu_direct",
    "classify": "kvd.commands.classify",
    "demo": "kvd.demo",
    "purge": "kvd.commands.purge",
    "quota": "kvd.commands.quota",
    "replay": "kvd.replay",
    "size": "kvd.policy.cli",
    "soak": "kvd.soak",
    "statctl": "kvd.statctl",
    "status": "kvd.commands.status",
    "top": "kvd.commands.top",
    "verdict": "kvd.commands.verdict",
}
