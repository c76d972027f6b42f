"""An environment that asks once more, with the length of each answer, and warns of short ones."""

from megarl.environments import Action, Environment, Reply
from megarl.types import Message


class Asking(Environment):
    async def reply(self, action: Action) -> Reply:
        if action.turn == 1:
            return Reply(done=True, reward=float(action.num_tokens % 2))
        said = Message(role="tool", content=f"that has {action.num_tokens} tokens; again")
        warning = Message(role="tool", content="so short")
        return Reply(messages=(said, warning), warnings=(1,))

    async def resume(self, prompt: object, actions: object) -> bool:
        return True
