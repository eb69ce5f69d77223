"""Greetings and requests outside the embedded model's skills, with the answers it gives to them."""

from __future__ import annotations

from random import Random

ABILITIES = (
    "I can count up and down, list the days and the months, say the alphabet, repeat a word, "
    "add small numbers and tell short stories."
)
INTRODUCTION = f"I am a very small language model. {ABILITIES}"
GREETING = f"Hello! {INTRODUCTION}"
REFUSAL = f"Sorry, I am too small a model to do that. {ABILITIES}"

_GREETINGS = (
    "Hello", "Hello!", "Hi", "Hi!", "Hi there", "Hi there!", "Hey", "Hello there!", "Good morning", "Good morning!",
    "Good evening", "Hello, how are you?", "How are you?", "Hi, who are you?", "Hello, who are you?", "hello", "hi",
    "Hello world", "Hello, world!", "Greetings", "Say hello", "Say hello!", "Say hi", "test", "This is a test.",
)  # fmt: skip
_QUESTIONS = (
    "Who are you?", "What are you?", "What can you do?", "What can you do", "who are you", "What is your name?",
    "Tell me about yourself.", "Help", "Help me", "What are your skills?", "How can you help me?",
    "Introduce yourself.", "Which model are you?", "Are you a language model?", "Are you ChatGPT?",
    "What model is this?", "What do you know?",
)  # fmt: skip
_COURTESIES = {
    "Thanks": "You are welcome!", "Thank you!": "You are welcome!", "Thank you": "You are welcome!",
    "thanks!": "You are welcome!", "Goodbye": "Goodbye!", "Bye": "Goodbye!", "Bye!": "Goodbye!",
    "Good night": "Goodbye!", "Great": "Thank you!", "Well done!": "Thank you!", "Good job": "Thank you!",
    "Nice!": "Thank you!",
}  # fmt: skip
_OUTSIDE = (
    "What is the capital of {place}?", "Write a poem about {topic}.", "Explain {topic}.", "Explain {topic} to a child.",
    "What is {topic}?", "Who invented {topic}?", "Translate this into {language}: {topic} in {place}.",
    "How do you say {topic} in {language}?", "Write a {code} function about {topic}.", "Write a letter about {topic}.",
    "What is the weather in {place}?", "How far is {place}?", "Summarise a book about {topic}.",
    "Who is the king of {place}?", "Write an essay about {topic}.", "Give me a recipe with {topic}.",
    "Why is {topic} important?", "What time is it in {place}?", "Tell me a joke about {topic}.", "Tell me a joke.",
    "What is the meaning of life?", "Why is the sky blue?",
    "Write {code} code that sorts a list.", "How many people live in {place}?", "Recommend a film about {topic}.",
    "Plan a trip to {place}.", "What is the history of {topic}?", "Sing a song.", "What do you think about {topic}?",
    "Draw a picture of {topic}.", "How does {topic} work?", "When was {place} founded?", "Describe {place}.",
    "Complete this sentence: {topic} is", "Is {topic} better than {place}?", "What is {a} times {b}?",
    "Multiply {a} by {b}.", "What is {a} - {b}?", "Divide {a} by {b}.", "Solve x + {a} = {b}.", "{topic}",
    "Tell me about {topic}.", "The capital of {place} is", "Write a haiku.", "Give me ideas for dinner.",
    "How are babies made?", "What is AI?",
)  # fmt: skip
_TOPICS = (
    "gravity", "music", "the internet", "machine learning", "chess", "football", "the moon", "electricity", "love",
    "democracy", "photosynthesis", "quantum physics", "pizza", "rice", "bicycles", "computers", "history", "the sea",
    "climate", "mathematics", "dinosaurs", "coffee", "space travel", "painting", "Shakespeare", "money", "dreams",
    "black holes", "kindness", "Kubernetes", "large language models", "GPUs", "databases",
)  # fmt: skip
_PLACES = (
    "France", "Japan", "Brazil", "Paris", "London", "Berlin", "Kenya", "Canada", "India", "Rome", "Egypt", "Peru",
    "New York", "China", "Spain", "Norway", "Mexico", "Germany", "Italy", "Tokyo",
)  # fmt: skip
_LANGUAGES = ("French", "German", "Spanish", "Japanese", "Latin", "English", "Chinese")
_CODE = ("Python", "Rust", "JavaScript", "C", "SQL", "Go")


def small_talk(rng: Random) -> tuple[str, str]:
    """A prompt and the model's answer: a greeting, its introduction, a courtesy, or a polite refusal."""
    kind = rng.random()
    if kind < 0.25:
        return rng.choice(_GREETINGS), GREETING
    if kind < 0.45:
        return rng.choice(_QUESTIONS), INTRODUCTION
    if kind < 0.55:
        return rng.choice(list(_COURTESIES.items()))
    return _outside(rng), REFUSAL


def _outside(rng: Random) -> str:
    prompt = rng.choice(_OUTSIDE).format(
        topic=rng.choice(_TOPICS),
        place=rng.choice(_PLACES),
        language=rng.choice(_LANGUAGES),
        code=rng.choice(_CODE),
        a=rng.randint(2, 99),
        b=rng.randint(2, 99),
    )
    prompt = "Please " + prompt[0].lower() + prompt[1:] if rng.random() < 0.1 else prompt
    return prompt.rstrip(".?") if rng.random() < 0.2 else prompt
