"""LlamaIndex: embeddings by its class for servers that speak as OpenAI's does, and by the one for OpenAI's."""

from checks import BASE_URL, EMBEDDING_MODEL, KEY, check, check_vectors, run
from llama_index.embeddings.openai import OpenAIEmbedding
from llama_index.embeddings.openai_like import OpenAILikeEmbedding


@check
def like_openai() -> None:
    """embeddings of a query and of texts, of a server like OpenAI's"""
    model = OpenAILikeEmbedding(model_name=EMBEDDING_MODEL, api_base=BASE_URL, api_key=KEY)
    check_vectors(model.get_query_embedding, model.get_text_embedding_batch)


@check
def openai() -> None:
    """embeddings of a query and of texts, as of OpenAI"""
    model = OpenAIEmbedding(model_name=EMBEDDING_MODEL, api_base=BASE_URL, api_key=KEY)
    check_vectors(model.get_query_embedding, model.get_text_embedding_batch)


run()
