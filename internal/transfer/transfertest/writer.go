package transfertest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

// jobEnv carries the writerJob to the process that the suite starts.
const jobEnv = "BATON_TRANSFERTEST_WRITER"

// writerJob is what the other process does: write the first Bytes of the memory over
// and over, with Outstanding writes at a time, each with a notification.
type writerJob struct {
	Descriptor  transfer.Descriptor
	Session     transfer.SessionID
	Grant       transfer.GrantID
	Key         room.Key
	Bytes       int
	Outstanding int
}

// writerMain is the other process. It says "ready" on stdout when it is connected and
// "refused: ..." when its first write fails, and ends when stdin does.
func writerMain(text string, source transfer.Transport) int {
	var job writerJob
	if err := json.Unmarshal([]byte(text), &job); err != nil {
		fmt.Println("bad job:", err)
		return 2
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	peer, err := source.Dial(ctx, job.Descriptor, job.Session)
	if err != nil {
		fmt.Println("dial:", err)
		return 2
	}
	fmt.Println("ready")
	refused := make(chan error, 1)
	for k := range job.Outstanding {
		src := make([]byte, job.Bytes)
		keepWriting(peer, job, src, byte(k), refused)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = io.Copy(io.Discard, os.Stdin)
	}()
	select {
	case err := <-refused:
		fmt.Println("refused:", err)
		<-ended
	case <-ended:
	}
	if err := peer.Close(); err != nil {
		fmt.Println("close:", err)
		return 2
	}
	return 0
}

// keepWriting posts src, and from each completion again with other bytes, until an
// error, which goes to refused if it is the first.
func keepWriting(peer transfer.Peer, job writerJob, src []byte, v byte, refused chan<- error) {
	for i := range src {
		src[i] = v
	}
	fail := func(err error) {
		select {
		case refused <- err:
		default:
		}
	}
	err := peer.Post(transfer.Write{
		Grant: job.Grant, Key: job.Key, Segments: []transfer.Segment{{Off: 0, Src: src}}, Notify: []byte{v},
		Done: func(err error) {
			if err != nil {
				fail(err)
				return
			}
			// Not on the transport's goroutine: filling the buffer takes a while.
			go keepWriting(peer, job, src, v+byte(job.Outstanding), refused)
		},
	})
	if err != nil {
		fail(err)
	}
}
