package sim

import (
	"errors"
	"strings"
	"unicode/utf8"

	"github.com/baton-pd/baton/internal/engine"
)

// The vocabulary: 0 is unused, byte b is 3+b, then the chat marks.
const (
	tokBOS     engine.Token = 1
	tokEOS     engine.Token = 2
	tokByte0   engine.Token = 3
	tokImStart engine.Token = tokByte0 + 256
	tokImEnd   engine.Token = tokImStart + 1
	vocabSize               = int(tokImEnd) + 1
)

var specials = []struct {
	text string
	t    engine.Token
}{{"<|im_start|>", tokImStart}, {"<|im_end|>", tokImEnd}, {"<s>", tokBOS}, {"</s>", tokEOS}}

// chatTemplate is ChatML.
const chatTemplate = `{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}`

func byteToken(b byte) engine.Token { return tokByte0 + engine.Token(b) }

func isEOG(t engine.Token) bool { return t == tokEOS || t == tokImEnd }

type tokenizer struct{}

// Tokenize gives one token a byte, and with special one token a control text.
func (tokenizer) Tokenize(text string, addBOS, special bool) ([]engine.Token, error) {
	if strings.IndexByte(text, 0) >= 0 {
		return nil, errors.New("sim: tokenize: text holds a NUL byte")
	}
	if !utf8.ValidString(text) {
		return nil, errors.New("sim: tokenize: text is not valid UTF-8")
	}
	out := make([]engine.Token, 0, len(text)+1)
	if addBOS {
		out = append(out, tokBOS)
	}
	for i := 0; i < len(text); {
		if special && text[i] == '<' {
			if t, n := specialAt(text[i:]); n > 0 {
				out = append(out, t)
				i += n
				continue
			}
		}
		out = append(out, byteToken(text[i]))
		i++
	}
	return out, nil
}

func specialAt(s string) (engine.Token, int) {
	for _, sp := range specials {
		if strings.HasPrefix(s, sp.text) {
			return sp.t, len(sp.text)
		}
	}
	return 0, 0
}

// Piece is the token's byte; control and unknown tokens have none.
func (tokenizer) Piece(t engine.Token) []byte {
	if t < tokByte0 || t >= tokByte0+256 {
		return nil
	}
	return []byte{byte(t - tokByte0)}
}

// IsEOG is true for EOS and the end of a chat message.
func (tokenizer) IsEOG(t engine.Token) bool { return isEOG(t) }

// SpecialTexts lists the control texts.
func (tokenizer) SpecialTexts() []string {
	out := make([]string, len(specials))
	for i, sp := range specials {
		out[i] = sp.text
	}
	return out
}
