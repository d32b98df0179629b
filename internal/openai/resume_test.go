package openai

import (
	"fmt"
	"slices"
	"testing"

	"github.com/baton-pd/baton/internal/engine"
)

func TestTokensComment(t *testing.T) {
	for _, c := range []struct {
		tokens []engine.Token
		end    bool
		want   string
	}{
		{[]engine.Token{5}, false, ": baton-tokens 5\n"},
		{[]engine.Token{0, 7, 1<<31 - 1}, false, ": baton-tokens 0,7,2147483647\n"},
		{nil, true, ": baton-tokens  end\n"},
	} {
		event := AppendEvent(AppendTokens(nil, c.tokens, c.end), []byte(`{"a":1}`))
		got, end, rest, ok := CutTokens([]engine.Token{3}, event)
		if string(event) != c.want+"data: {\"a\":1}\n\n" || !ok || end != c.end || !slices.Equal(got[1:], c.tokens) || string(rest) != "data: {\"a\":1}\n\n" {
			t.Errorf("%+v: %q, %v %v %q", c, event, got, end, rest)
		}
	}
	for _, bad := range []string{
		"", "data: x\n\n", ": ping\n\n", ": baton-tokens 1", ": baton-tokens x\n", ": baton-tokens -1\n", ": baton-tokens 1,,2\n", ": baton-tokens 1 \n", ": baton-tokens 2147483648\n", ": baton-tokens 1 end \n",
	} {
		got, end, rest, ok := CutTokens([]engine.Token{3}, []byte(bad))
		if ok || end || string(rest) != bad || len(got) != 1 {
			t.Errorf("%q: %v %v %q %v", bad, got, end, rest, ok)
		}
	}
	if s := fmt.Sprintf("%q", AppendTokens[int32](nil, nil, false)); s != `": baton-tokens \n"` {
		t.Error(s)
	}
}
