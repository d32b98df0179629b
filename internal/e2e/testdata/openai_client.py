"""The OpenAI Python client, unchanged, against Baton.

openai_client.py URL check   runs every check and prints its name; the first failure ends it.
openai_client.py URL cancel  leaves in mid-stream: prints "streaming", waits for a line on
                             standard input, closes the stream, prints "closed", waits for the end of input.
"""

import sys

import openai
from openai import OpenAI


def client(url):
    return OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60)


CHAT = [
    {"role": "system", "content": "You answer briefly."},
    {"role": "user", "content": "Name three colours."},
]


def models(c, model):
    assert [m.id for m in c.models.list()] == [model]
    assert c.models.retrieve(model).owned_by == "baton"


def chat(c, model):
    a = c.chat.completions.create(model=model, messages=CHAT, max_tokens=16, temperature=0)
    (choice,) = a.choices
    assert choice.message.role == "assistant" and choice.message.content, a
    assert choice.finish_reason in ("stop", "length"), a
    assert 0 < a.usage.completion_tokens <= 16, a
    assert a.usage.total_tokens == a.usage.prompt_tokens + a.usage.completion_tokens, a
    # What came back can be sent again.
    turn = [*CHAT, choice.message, {"role": "user", "content": "One more."}]
    b = c.chat.completions.create(model=model, messages=turn, max_tokens=4, temperature=0)
    assert b.usage.prompt_tokens > a.usage.prompt_tokens, b


def chat_streamed(c, model):
    whole = c.chat.completions.create(model=model, messages=CHAT, max_completion_tokens=16, temperature=0)
    text, finish, usage, after_usage = "", None, None, 0
    with c.chat.completions.create(
        model=model, messages=CHAT, max_completion_tokens=16, temperature=0,
        stream=True, stream_options={"include_usage": True},
    ) as stream:
        for chunk in stream:
            after_usage += usage is not None
            if not chunk.choices:
                usage = chunk.usage
                continue
            assert chunk.usage is None, chunk
            text += chunk.choices[0].delta.content or ""
            finish = chunk.choices[0].finish_reason or finish
    assert text == whole.choices[0].message.content, (text, whole)
    assert finish == whole.choices[0].finish_reason, finish
    assert usage == whole.usage and after_usage == 0, (usage, whole.usage)


def stream_helper(c, model):
    whole = c.chat.completions.create(model=model, messages=CHAT, max_tokens=16, temperature=0).choices[0].message.content
    # The helper refuses an answer that ends for its length, so this one ends at a stop string.
    with c.chat.completions.stream(model=model, messages=CHAT, max_tokens=16, temperature=0, stop=whole[8:12]) as stream:
        deltas = "".join(e.delta for e in stream if e.type == "content.delta")
        final = stream.get_final_completion()
    assert deltas and final.choices[0].message.content == deltas and final.choices[0].finish_reason == "stop", (deltas, final)


def stop_strings(c, model):
    prompt = "The quick brown fox"
    whole = c.completions.create(model=model, prompt=prompt, max_tokens=24, temperature=0).choices[0].text
    assert len(whole) > 24, whole
    for at in (4, 9, 15):
        stop = whole[at : at + 4]  # lies across the border of two tokens, or within one
        a = c.completions.create(model=model, prompt=prompt, max_tokens=24, temperature=0, stop=[stop, "never"])
        want = whole[: whole.index(stop)]
        assert a.choices[0].text == want and a.choices[0].finish_reason == "stop", (stop, want, a)
        pieces = c.completions.create(model=model, prompt=prompt, max_tokens=24, temperature=0, stop=stop, stream=True)
        assert "".join(p.choices[0].text for p in pieces if p.choices) == want, stop


def several_choices(c, model):
    kw = dict(model=model, prompt="Once upon a time", max_tokens=12, n=3, temperature=1, seed=7)
    a = c.completions.create(**kw)
    assert [x.index for x in a.choices] == [0, 1, 2], a
    texts = [x.text for x in a.choices]
    assert len(set(texts)) > 1, texts
    assert 12 <= a.usage.completion_tokens <= 36, a
    b = c.completions.create(**kw)
    assert [x.text for x in b.choices] == texts, (texts, b)
    streamed = ["", "", ""]
    for p in c.completions.create(**kw, stream=True):
        for x in p.choices:
            streamed[x.index] += x.text
    assert streamed == texts, (streamed, texts)


def logprobs(c, model):
    a = c.completions.create(model=model, prompt="One, two,", max_tokens=6, temperature=0, logprobs=3).choices[0]
    lp = a.logprobs
    assert "".join(lp.tokens) == a.text and len(lp.tokens) == 6, a
    for token, p, top in zip(lp.tokens, lp.token_logprobs, lp.top_logprobs):
        assert p <= 0 and top[token] == p and p == max(top.values()) and 3 <= len(top) <= 4, a
    b = c.chat.completions.create(
        model=model, messages=CHAT, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2
    ).choices[0]
    for t in b.logprobs.content:
        assert len(t.top_logprobs) == 2 and t.top_logprobs[0].token == t.token, b
    assert b"".join(bytes(t.bytes) for t in b.logprobs.content).decode() == b.message.content, b


def echo(c, model):
    prompt = "Grüße aus 北京 🎉, zusammen"
    plain = c.completions.create(model=model, prompt=prompt, max_tokens=5, temperature=0).choices[0].text
    a = c.completions.create(model=model, prompt=prompt, max_tokens=5, temperature=0, echo=True).choices[0].text
    assert a == prompt + plain, (a, plain)


def seeds(c, model):
    def ask(seed):
        return c.chat.completions.create(
            model=model, messages=CHAT, max_tokens=16, temperature=1.2, seed=seed
        ).choices[0].message.content

    assert ask(5) == ask(5)
    assert len({ask(s) for s in range(4)}) > 1


def failures(c, model):
    def refused(kind, code, param=None, **kw):
        args = dict(model=model, messages=CHAT, max_tokens=4)
        args.update(kw)
        try:
            a = c.chat.completions.create(**args)
        except kind as e:
            assert e.code == code, e
            assert param is None or e.param == param, e
            assert e.body["cause"] == "invalid_request" and e.body["message"], e.body
            return e
        raise AssertionError(f"{kw} was answered: {a}")

    refused(openai.NotFoundError, "model_not_found", "model", model="gpt-9")
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    e = refused(openai.BadRequestError, "unsupported_field", "tools", tools=[tool])
    assert "tools" in e.body["message"], e.body
    refused(openai.BadRequestError, "unsupported_field", "audio", extra_body={"audio": {"voice": "x"}})
    refused(openai.BadRequestError, "invalid_value", "temperature", temperature=7)
    refused(openai.BadRequestError, "context_length_exceeded", "messages", messages=[{"role": "user", "content": "word " * 9000}])
    # Sent whole before the answer is read: it must arrive all the same.
    try:
        c.chat.completions.create(model=model, messages=[{"role": "user", "content": "x" * (50 << 20)}])
        raise AssertionError("50 MiB were answered")
    except openai.APIStatusError as e:
        assert e.status_code == 413 and e.code == "body_too_large", e


def check(url):
    c = client(url)
    model = c.models.list().data[0].id
    for f in (models, chat, chat_streamed, stream_helper, stop_strings, several_choices, logprobs, echo, seeds, failures):
        f(c, model)
        print("ok", f.__name__, flush=True)


def cancel(url):
    c = client(url)
    stream = c.chat.completions.create(model=c.models.list().data[0].id, messages=CHAT, max_tokens=3000, stream=True,
                                       extra_body={"ignore_eos": True})
    pieces = iter(stream)
    for _ in range(4):
        next(pieces)
    print("streaming", flush=True)
    sys.stdin.readline()
    stream.close()
    print("closed", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    {"check": check, "cancel": cancel}[sys.argv[2]](sys.argv[1])
