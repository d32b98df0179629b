package httpbody

import (
	"bytes"
	"io"
	"testing"
)

// pieces is a reader that gives as many bytes at a time as cuts say, and sometimes none.
type pieces struct {
	data, cuts []byte
	end        error
}

func (p *pieces) Read(b []byte) (int, error) {
	n := len(b)
	if len(p.cuts) > 0 {
		n = min(n, int(p.cuts[0])*97)
		p.cuts = p.cuts[1:]
	}
	n = copy(b[:n], p.data)
	p.data = p.data[n:]
	if len(p.data) == 0 {
		return n, p.end
	}
	return n, nil
}

// FuzzRead: however a body comes in, it is read as it is; a reader's error comes without data.
func FuzzRead(f *testing.F) {
	f.Add([]byte("hello"), 1, []byte{1, 0, 2}, false)
	f.Add([]byte("x"), firstPiece, []byte{255, 255, 255}, false)
	f.Add([]byte("xy"), maxPiece, []byte{}, true)
	f.Fuzz(func(t *testing.T, data []byte, times int, cuts []byte, broken bool) {
		if times < 0 || times*len(data) > 4<<20 {
			return
		}
		data = bytes.Repeat(data, times)
		end := io.EOF
		if broken {
			end = io.ErrClosedPipe
		}
		got, err := Read(&pieces{data, cuts, end})
		switch {
		case broken && (err != io.ErrClosedPipe || got != nil):
			t.Fatalf("%d bytes and %v from a broken body", len(got), err)
		case !broken && (err != nil || !bytes.Equal(got, data)):
			t.Fatalf("%d bytes became %d, %v", len(data), len(got), err)
		case cap(got) > max(firstPiece, len(data)+maxPiece):
			t.Fatalf("%d bytes are held in %d", len(data), cap(got))
		}
	})
}
