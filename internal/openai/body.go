package openai

import "io"

// The pieces in which ReadBody reads: most bodies fit the first.
const (
	firstPiece = 16 << 10
	maxPiece   = 1 << 20
)

// ReadBody reads r to its end, holding what has come and at most one piece more, and twice
// that for the moment of joining. A buffer that grows by doubling would hold up to four times a
// body of unknown length, and one made for the announced length trusts who announces. Errors of r
// come as they are, without data.
func ReadBody(r io.Reader) ([]byte, error) {
	var full [][]byte // pieces without room
	piece, total := make([]byte, 0, firstPiece), 0
	for {
		if len(piece) == cap(piece) {
			full = append(full, piece)
			piece = make([]byte, 0, min(4*cap(piece), maxPiece))
		}
		n, err := r.Read(piece[len(piece):cap(piece)])
		piece, total = piece[:len(piece)+n], total+n
		switch {
		case err == io.EOF && full == nil:
			return piece, nil
		case err == io.EOF:
			out := make([]byte, 0, total)
			for _, p := range append(full, piece) {
				out = append(out, p...)
			}
			return out, nil
		case err != nil:
			return nil, err
		}
	}
}
