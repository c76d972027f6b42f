"""Support the APIs by which clients request turns: OpenAI's chat completions and responses, Anthropic's messages."""

from megarl.environments.dialects.base import Dialect as Dialect
from megarl.environments.dialects.chat_completions import ChatCompletions
from megarl.environments.dialects.messages import Messages
from megarl.environments.dialects.responses import Responses

DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), Messages(), Responses())
