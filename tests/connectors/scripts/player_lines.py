"""The player's end of engine_players.py: a JSON request a line, a JSON answer a line."""

import json
import sys


def serve(player):
    """Until the end of input: `do` is a method, `blocks` its first argument, all else named."""
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(player, request.pop("do"))(request.pop("blocks"), **request)
        print(json.dumps(answer), flush=True)
    player.close()
