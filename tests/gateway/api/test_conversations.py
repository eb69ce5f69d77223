"""A conversation as it is stored, without a server."""

import pytest

from gateway.api.conversations import StoredConversation
from gateway.errors import ConversationNotFound


def test_items_of_a_conversation_are_parsed_when_they_are_asked_for_and_are_not_all_parsed_at_once() -> None:
    items = [{"id": f"msg_{n}", "type": "message", "role": "user", "content": f"line\n{n}"} for n in range(4)]
    conversation = StoredConversation({"id": "conv_0", "metadata": {}, "items": []}, [])
    conversation.add(items)
    read = StoredConversation.parsed(conversation.written())
    assert read == conversation and all(type(line) is bytes for line in read.lines)
    read.remove("msg_1")
    assert [read.item(name) for name in read.fields["items"]] == [items[0], *items[2:]]
    with pytest.raises(ConversationNotFound, match="'conv_0' has no item 'msg_1'"):
        read.item("msg_1")
    assert StoredConversation.parsed(StoredConversation({"id": "conv_1", "items": []}, []).written()).lines == []
