package llamacpp

import (
	"errors"
	"testing"

	"github.com/baton-pd/baton/internal/engine/llamacpp/gguftest"
)

// openTiny makes an engine on a model of random weights, which computes in microseconds.
func openTiny(t testing.TB, change func(*Config)) *Engine {
	t.Helper()
	path := gguftest.Llama(1).Write(t, "tiny.gguf")
	return open(t, func(c *Config) {
		c.Model = path
		if change != nil {
			change(c)
		}
	})
}

func TestRefusesOtherArchitectures(t *testing.T) {
	needModel(t)
	for name, path := range map[string]string{
		"recurrent":      gguftest.Mamba(1).Write(t, "mamba.gguf"),
		"sliding window": gguftest.Gemma2(1).Write(t, "gemma2.gguf"),
	} {
		e, err := Open(Config{LibDir: paths.LibDir, Model: path})
		if !errors.Is(err, ErrModel) {
			t.Errorf("%s: %v", name, err)
		}
		t.Log(err)
		if e != nil {
			t.Errorf("%s: an engine came with the error", name)
		}
	}
}

func TestTinyInfo(t *testing.T) {
	e := openTiny(t, nil)
	i := e.Info()
	t.Logf("%+v", i)
	if i.KVLayout != "layers=2 k=f16x32 v=f16x32 vtrans=0" || i.VocabSize != gguftest.VocabSize || i.BOS != 1 || i.EOS != 2 ||
		i.ChatTemplate != "{{ messages }}" || i.ModelName != "tiny" {
		t.Errorf("%+v", i)
	}
}
