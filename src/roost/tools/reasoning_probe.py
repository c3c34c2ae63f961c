"""Whether a chat template is that of a model that thinks, told by rendering conversations.

Three signs: the prompt for an answer ends with an opening tag; a thought of its own field comes out between tags; a
thought in an earlier answer is left out. Called by tools.model_formats.
"""

from roost.tools.reasoning import ReasoningTags
from roost.tools.registry import Render, rendered

_BEGIN, _END = "<think>", "</think>"
_THOUGHT, _ANSWER = "Let me see about that", "It is four"
_ASKED = {"role": "user", "content": "What is two and two?"}


def detect_reasoning(render: Render) -> ReasoningTags | None:
    """The tags between which the model thinks; None if it does not."""
    prompt = rendered(render, [_ASKED], add_generation_prompt=True)
    if prompt is not None and prompt.rstrip().endswith(_BEGIN):
        return ReasoningTags(begin=_BEGIN, end=_END, is_open=True)
    own = rendered(render, [_ASKED, {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT}])
    said = {"role": "assistant", "content": f"{_BEGIN}{_THOUGHT}{_END}{_ANSWER}"}
    earlier = rendered(render, [_ASKED, said, _ASKED])
    is_tagged = own is not None and own.partition(_BEGIN)[2].partition(_END)[0].strip() == _THOUGHT
    is_left_out = earlier is not None and _THOUGHT not in earlier and _ANSWER in earlier
    return ReasoningTags(begin=_BEGIN, end=_END, is_open=False) if is_tagged or is_left_out else None
