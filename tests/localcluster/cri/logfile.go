package cri

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// logFile is a container's log, which the kubelet may move away and ask to have opened again.
type logFile struct {
	path string
	now  func() time.Time

	mu   sync.Mutex
	file *os.File
}

// linePart is the longest part of a line that is written as one entry, as in other runtimes.
const linePart = 16 << 10

// open opens the file by its name, which may be another file than so far.
func (l *logFile) open() error {
	f, err := os.OpenFile(l.path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file != nil {
		l.file.Close()
	}
	l.file = f
	return nil
}

func (l *logFile) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file != nil {
		l.file.Close()
		l.file = nil
	}
}

// put writes one entry: the whole rest of a line (F), or a part of one (P). What can't be written is lost, as the container
// must not stop for its log.
func (l *logFile) put(stream, tag string, text []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file != nil {
		_, _ = fmt.Fprintf(l.file, "%s %s %s %s\n", l.now().UTC().Format(time.RFC3339Nano), stream, tag, text)
	}
}

// copy writes each line with its time and stream, long ones in parts, until the last writer has closed its end.
func (l *logFile) copy(from io.Reader, stream string) {
	buf := make([]byte, linePart)
	var line []byte
	for {
		n, err := from.Read(buf)
		line = append(line, buf[:n]...)
		for {
			i := bytes.IndexByte(line, '\n')
			if i < 0 {
				break
			}
			l.put(stream, "F", line[:i])
			line = line[i+1:]
		}
		if len(line) >= linePart {
			l.put(stream, "P", line)
			line = nil
		}
		if err != nil {
			if len(line) > 0 {
				l.put(stream, "F", line)
			}
			return
		}
	}
}
